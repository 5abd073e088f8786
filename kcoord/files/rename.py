"""Publishing: a staged directory becomes an artifact by one `rename`, which one writer wins.

The results of `rename` were measured on local disks and on NFS v3 and v4.1:

===================== ======================================================================
``0``                 published
``EEXIST, ENOTEMPTY`` another writer won; its artifact is used if it verifies, else quarantined
``ENOENT``            a resent NFS rename may have succeeded: look for our own manifest in the target
``EXDEV, EACCES, …``  `StoreError`, with the remedy; the caller trains on with its own copy
===================== ======================================================================

A directory rename replaces an *empty* directory, so never make one at a final name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files import beneath
from kcoord.files.faults import store_errors
from kcoord.files.reading import read_plain


def write_files(directory: Path, contents: dict[str, bytes], *, durable: bool) -> None:
    """Write named contents below `directory`. `durable`: fsync each, so that they survive a crash."""
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content, durable=durable)


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


def _make(directory: Path, root: Path | None) -> None:
    """`beneath.mkdir`. Touches the parent, so that an NFS client that cached the name as missing looks again."""
    try:
        beneath.mkdir(directory, root, 0o777 if root is not None else 0o700)
    except FileExistsError:
        return
    with contextlib.suppress(OSError):  # the directory exists
        beneath.touched(directory.parent, root)


def rename_into_place(
    staging: Path,
    final: Path,
    manifest_name: str,
    is_valid: Callable[[Path], bool | None],
    quarantine: Path,
    root: Path | None = None,
    *,
    durable: bool,
) -> bool:
    """Publish `staging` at `final`, whose parent's parent exists. Returns True if ours is there, False if another's valid one is.

    ``is_valid(final)`` judges another writer's: one that fails is moved into `quarantine`; None means that it has gone. A
    loser's staging directory is removed. All of it lies below `root` (`kcoord.files.beneath`). Not guaranteed: that the winner is
    still there when this returns. Raises `StoreError`.
    """
    why = "another's artifact comes and goes there: does something clean this directory?"
    with store_errors(final):
        token = (staging / manifest_name).read_bytes()  # unique: it states its writer and its time
        _make(final.parent, root)
        if durable:
            sync_directory(staging)
        for _ in range(3):
            won = _rename(staging, final, manifest_name, token, root)
            if won:
                if durable:
                    sync_directory(final.parent)
                with contextlib.suppress(OSError):  # it is published
                    beneath.touched(final.parent, root)  # an NFS client that cached "missing" looks again
                return True
            valid = is_valid(final)
            if valid:
                beneath.remove(staging, root)
                return False
            if valid is not None:
                why = "three invalid artifacts in a row were found there: check who writes to the directory"
                set_aside(final, quarantine, root)
    raise StoreError(f"{final}: {why}", why)


def _rename(staging: Path, final: Path, manifest_name: str, token: bytes, root: Path | None) -> bool:
    try:
        beneath.rename(staging, final, root)
    except OSError as error:
        with contextlib.suppress(OSError):
            refresh_names(final.parent)  # the failed rename does not correct an NFS client that saw the name missing
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        if error.errno == errno.ENOTDIR and _is_directory(final.parent, root):
            return False  # a file or a symbolic link is at the name, and no artifact
        if error.errno == errno.ENOENT and _holds(final / manifest_name, token):
            return True
        raise
    return True


def _is_directory(path: Path, root: Path | None) -> bool:
    try:
        with beneath.opened(path, root):
            return True
    except OSError:
        return False


def _holds(manifest: Path, token: bytes) -> bool:
    try:
        return read_plain(manifest, len(token)) == token
    except (OSError, ArtifactInvalid):  # another user may have put a pipe there
        return False


def set_aside(path: Path, quarantine: Path, root: Path | None = None) -> None:
    """Move a directory into `quarantine`, for inspection. Its present readers can go on. Both are below `root`."""
    if root is None:
        make_below(quarantine, 0o700)
    else:
        with contextlib.suppress(FileExistsError):
            beneath.mkdir(quarantine, root)
    try:
        beneath.rename(path, quarantine / f"{path.name}-{uuid.uuid4().hex[:12]}", root)
    except FileNotFoundError:
        return  # another process moved it first
