"""Publishing in the local tier: a staged directory becomes an artifact by one `rename`, which one writer wins.

If a directory is there already (EEXIST, ENOTEMPTY) another writer won: its artifact is used if it verifies, and moved aside if
not. Any other error is a `StoreError` with its remedy; the caller trains on with its own copy. A rename replaces an *empty*
directory, so never make one at a final name.

Not guaranteed, where a cache directory on NFS is named: that a rename which the client sent twice counts as done. Then the
artifact is on its node, and nobody else is told.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from kcoord.errors import StoreError
from kcoord.files import beneath
from kcoord.files.faults import store_errors


def write_files(directory: Path, contents: dict[str, bytes]) -> None:
    """Write named contents below `directory`."""
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_file(path: Path, content: bytes, *, durable: bool) -> None:
    with path.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """fsync a directory. Some file systems cannot, and need not."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_below(directory: Path, mode: int = 0o777) -> None:
    """Make `directory` and its parent if need be, and nothing further up: it is no store that is not mounted."""
    for missing in (directory.parent, directory):
        with contextlib.suppress(FileExistsError):
            missing.mkdir(mode=mode)


def refresh_names(directory: Path) -> None:
    """Open `directory`, so that an NFS client that cached one of its names as missing looks again (`stat` is not enough).

    Raises OSError; FileNotFoundError also if `directory` itself is cached as missing.
    """
    os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def rename_into_place(staging: Path, final: Path, is_valid: Callable[[Path], bool], quarantine: Path) -> bool:
    """Publish `staging` at `final`, whose parent's parent exists. Returns True if ours is there, False if another's valid one is.

    ``is_valid(final)`` judges another writer's: one that fails is moved into `quarantine`. A loser's staging directory is
    removed. Not guaranteed: that the winner is still there when this returns, or survives a crash. Raises `StoreError`.
    """
    why = "three invalid artifacts in a row were found there: check who writes to the directory"
    with store_errors(final):
        with contextlib.suppress(FileExistsError):
            final.parent.mkdir(mode=0o700)
        for _ in range(3):
            if _rename(staging, final):
                with contextlib.suppress(OSError):  # it is published
                    beneath.touched(final.parent)  # an NFS client that cached "missing" looks again
                return True
            if is_valid(final):
                beneath.remove(staging)
                return False
            set_aside(final, quarantine)
    raise StoreError(f"{final}: {why}", why)


def _rename(staging: Path, final: Path) -> bool:
    """False if something is at the name already."""
    try:
        beneath.rename(staging, final)
    except OSError as error:
        with contextlib.suppress(OSError):
            refresh_names(final.parent)  # the failed rename does not correct an NFS client that saw the name missing
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        if error.errno == errno.ENOTDIR and final.parent.is_dir():
            return False  # a file or a symbolic link is at the name, and no artifact
        raise
    return True


def set_aside(path: Path, quarantine: Path, root: Path | None = None) -> None:
    """Move a file or a directory into `quarantine`, for inspection. Its present readers can go on. Both are below `root`."""
    if root is None:
        make_below(quarantine, 0o700)
    else:
        with contextlib.suppress(FileExistsError):
            beneath.mkdir(quarantine, root)
    try:
        beneath.rename(path, quarantine / f"{path.name}-{uuid.uuid4().hex[:12]}", root)
    except FileNotFoundError:
        return  # another process moved it first
