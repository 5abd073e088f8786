"""The local directory where none is named: ``$TMPDIR/kcoord-<uid>``, usually on local disk, unlike a home directory.

On a machine that others use, too, another user can make a directory, or a link, of that name. Then another name is taken, the
same for all processes of this user: the first of ``kcoord-<uid>-1``, ``-2``, … that this user has, or can make.
"""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from pathlib import Path

from kcoord.ownership import doubt_of, is_ours, is_safe_to_share

_MOST = 100  # names that others may have taken
_ELSEWHERE = ("/tmp", "/var/tmp")  # where others can replace whatever is in TMPDIR
_log = logging.getLogger("kcoord")


def usual_local_dir() -> Path:
    try:
        directory = tempfile.gettempdir()  # writes a file into each candidate
    except FileNotFoundError:  # none can be written just now: the code that needs the directory reports why
        directory = os.environ.get("TMPDIR") or "/tmp"
    return Path(directory).absolute() / f"kcoord-{os.getuid()}"


@functools.lru_cache(maxsize=16)
def own_directory(usual: Path) -> Path:
    """The directory `usual`, or a private one in its place, which is told once.

    Creates it. `usual` also if a disk refuses: the code that needs the directory reports why.
    """
    try:
        why = _problem(usual)
        if why:
            places = dict.fromkeys((usual, *(Path(directory, usual.name) for directory in _ELSEWHERE)))
            instead = next(filter(None, map(_instead_of, places)), None)
            if instead is not None:
                _log.warning(
                    "kcoord: %s: %s is used instead; set KCOORD_LOCAL_DIR to a directory of your own", why, instead
                )
                return instead
    except OSError:
        pass
    return usual


def _problem(directory: Path) -> str:
    """Empty if `directory` is this user's alone; it is created if it is not there. Raises OSError."""
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        if directory.is_symlink():
            return f"{directory}: it is a symbolic link"
        if (uid := directory.lstat().st_uid) != os.geteuid():
            return f"{directory}: it belongs to user {uid}"
    doubt = doubt_of(directory)
    return "" if doubt is None else str(doubt)


def _instead_of(usual: Path) -> Path | None:
    """Another directory beside `usual`; None if others could replace it, too."""
    try:
        if not (is_ours(os.geteuid()) and is_safe_to_share(usual.parent)):
            return None
        names = (usual.with_name(f"{usual.name}-{number}") for number in range(1, _MOST))
        found = next((name for name in names if not _problem(name)), None)
        return found or Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=usual.parent))
    except OSError:
        return None
