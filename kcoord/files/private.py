"""Directories that only this user may write to."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from kcoord.errors import StoreError
from kcoord.files.faults import store_errors
from kcoord.ownership import Doubt, doubt_of, finding_of

_REMEDY = "set KCOORD_LOCAL_DIR to a directory of your own"


def make_private(directory: Path, remedy: str = _REMEDY) -> None:
    """Create `directory` for this user alone, or check that it is: a real directory of this user's, to which nobody else may
    write, and which nobody else can replace.

    Raises `StoreError` if it is not. Afterwards paths below it are safe to use, and to hand to a compiler, which takes no
    descriptors: nobody else can lead them elsewhere.
    """
    with store_errors(directory):
        make_directory(directory)
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

    Below `local_dir`, `Settings.local_dir`, modes do not count if that keeps others out. A tier that does not exist is created
    where another user could be first.
    """
    with store_errors(tier):
        shelter = ""
        if local_dir is not None and tier.is_relative_to(local_dir):
            make_private(local_dir)
            shelter = os.path.realpath(local_dir) if is_shelter(local_dir) else ""
        doubt = doubt_of(tier, shelter)
        if doubt is not None and not tier.exists():
            with suppress(OSError):
                make_directory(tier, 0o755)
                doubt = doubt_of(tier, shelter)
    if doubt is not None:
        raise StoreError(f"{doubt}: {_chmod(doubt)}choose a directory of your own")


def check_last(tier: str, local_dir: Path) -> None:
    """As `check_tier`, for a directory below `local_dir` if the one above it was found good. Costs two system calls."""
    with store_errors(Path(tier)), suppress(FileNotFoundError):
        found = os.lstat(tier)
        if stat.S_ISLNK(found.st_mode):
            check_tier(Path(tier), local_dir)
        elif finding := finding_of(tier, found, sheltered=is_shelter(local_dir)):
            raise StoreError(f"{tier}: {finding}: empty it and chmod go-w, or choose a directory of your own")


def make_own(directory: Path, local_dir: Path | None) -> None:
    """Create `directory`, one of kcoord's own in the local directory or a tier, for this user alone, whatever the umask.

    So are those above it that do not exist. One that exists is judged by `check_tier`. Raises OSError, `StoreError`.
    """
    make_directory(directory, above=0o700)
    check_tier(directory, local_dir)


def is_shelter(directory: Path) -> bool:
    """True if nobody else can enter `directory`, which is this user's. Raises OSError."""
    return not directory.stat().st_mode & 0o011


def make_directory(directory: Path, mode: int = 0o700, above: int = 0o755) -> None:
    """The umask only takes away from the modes."""
    try:
        directory.mkdir(mode=mode)
    except FileNotFoundError:
        make_directory(directory.parent, above, above)
        directory.mkdir(mode=mode, exist_ok=True)
    except FileExistsError:
        if not (directory.is_dir() or directory.is_symlink()):
            raise


def _chmod(doubt: Doubt) -> str:
    return "empty it and chmod go-w, or " if doubt.mode else ""
