"""Directories and files that only this user and root may write to: the rule of `kcoord.ownership`, as errors with a remedy."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from kcoord import ownership
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files.faults import store_errors
from kcoord.ownership import doubt_of, finding_of, make_directory

_REMEDY = "set KCOORD_LOCAL_DIR to a directory of your own"


def make_private(directory: Path, remedy: str = _REMEDY) -> None:
    """Create `directory` for this user alone, or check that it is: see `ownership.make_own`. Raises `StoreError` if it is not."""
    with store_errors(directory):
        _refuse(ownership.make_own(directory), remedy)


def make_tier(directory: Path) -> None:
    """As `make_private`, for artifacts. Raises `StoreError` also if no library can be mapped from there, and for ``/``."""
    if directory == Path("/"):
        raise StoreError(f"{directory}: it is the root of the file system: {_REMEDY}")
    make_private(directory)
    with store_errors(directory):
        if os.statvfs(directory).f_flag & os.ST_NOEXEC:
            raise StoreError(
                f"{directory}: it is mounted noexec, and compiled libraries do not load from there: {_REMEDY}"
            )


def check_tier(tier: Path) -> None:
    """Raises `StoreError` unless this user and root alone may write to `tier`, a directory of artifacts, or replace it.

    A tier that does not exist is created where another user could be first.
    """
    with store_errors(tier):
        doubt = doubt_of(tier)
        if doubt and not tier.exists():
            with suppress(OSError):
                make_directory(tier, 0o755)
                doubt = doubt_of(tier)
        _refuse(doubt, "choose a directory of your own")


def make_own(directory: Path) -> None:
    """Create `directory`, one of kcoord's own in the local directory or a tier, for this user alone, whatever the umask.

    So are those above it that do not exist. One that exists is judged by `check_tier`. Raises OSError, `StoreError`.
    """
    make_directory(directory, above=0o700)
    check_tier(directory)


def _refuse(doubt: str, remedy: str) -> None:
    if doubt:
        chmod = "empty it and chmod go-w, or " if doubt.endswith("may write to it") else ""
        raise StoreError(f"{doubt}: {chmod}{remedy}")


# Of an artifact.


def check_directory(path: str) -> None:
    """Raises `ArtifactInvalid` if the directory at `path` is a link, another user's, or others may write to it; OSError."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise ArtifactInvalid(f"{path} is a symbolic link")
    check_ours(path, found)


def check_folders(root: str, name: str) -> None:
    """As `check_directory`, for those between `root` and the file `name` below it. Most files are in none, and cost nothing."""
    end = name.find("/")
    while end != -1:
        check_directory(f"{root}/{name[:end]}")
        end = name.find("/", end + 1)


def check_ours(path: str, found: os.stat_result) -> None:
    """Raises `ArtifactInvalid` if others may change what is at `path`: see `finding_of`."""
    if finding := finding_of(path, found):
        raise ArtifactInvalid(f"{path}: {finding}: it is not used")
