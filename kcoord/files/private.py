"""Directories that only this user may write to."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from kcoord.errors import StoreError
from kcoord.files.faults import store_errors
from kcoord.ownership import Doubt, doubt_of

_REMEDY = "set KCOORD_LOCAL_DIR to a directory of your own"


def make_private(directory: Path, remedy: str = _REMEDY) -> None:
    """Create `directory` for this user alone, or check that it is: a real directory of this user's, to which nobody else may
    write, and which nobody else can replace.

    Raises `StoreError` if it is not. Afterwards paths below it are safe to use, and to hand to a compiler, which takes no
    descriptors: nobody else can lead them elsewhere.
    """
    with store_errors(directory):
        _make(directory)
        found = directory.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise StoreError(f"{directory}: it is a symbolic link: name the directory that it leads to, or {remedy}")
        if found.st_uid != os.geteuid():
            raise StoreError(f"{directory}: it belongs to user {found.st_uid}: {remedy}")
        doubt = doubt_of(directory)
        if doubt is not None:
            raise StoreError(f"{doubt}: {_chmod(doubt)}{remedy}")


def make_tier(directory: Path) -> None:
    """As `make_private`, for artifacts. Raises `StoreError` also if no library can be mapped from there."""
    make_private(directory)
    with store_errors(directory):
        if os.statvfs(directory).f_flag & os.ST_NOEXEC:
            raise StoreError(
                f"{directory}: it is mounted noexec, and compiled libraries do not load from there: {_REMEDY}"
            )


def check_tier(tier: Path, local_dir: Path | None) -> None:
    """Raises `StoreError` unless this user and root alone may write to `tier`, a directory of artifacts, or replace it.

    Below `local_dir`, `Settings.local_dir`, that directory keeps others out. A tier that does not exist is created where another
    user could be first.
    """
    with store_errors(tier):
        if local_dir is not None and _is_below(tier, local_dir):
            make_private(local_dir)
            return
        doubt = doubt_of(tier)
        if doubt is not None and not tier.exists():
            with suppress(OSError):
                _make(tier)
                doubt = doubt_of(tier)
    if doubt is not None:
        raise StoreError(f"{doubt}: {_chmod(doubt)}choose a directory of your own")


def _is_below(tier: Path, local_dir: Path) -> bool:
    """True by its name, so that no link of another user's leads there, and in fact: the name may be a link to a larger disk."""
    return tier.is_relative_to(local_dir) and Path(os.path.realpath(tier)).is_relative_to(os.path.realpath(local_dir))


def _make(directory: Path, mode: int = 0o700) -> None:
    try:
        directory.mkdir(mode=mode)
    except FileNotFoundError:
        _make(directory.parent, 0o755)
        directory.mkdir(mode=mode, exist_ok=True)
    except FileExistsError:
        if not (directory.is_dir() or directory.is_symlink()):
            raise


def _chmod(doubt: Doubt) -> str:
    return "empty it and chmod go-w, or " if doubt.mode else ""
