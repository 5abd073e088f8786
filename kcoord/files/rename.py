"""Publishing: a staged directory becomes an artifact by one `rename`, which one writer wins.

The table of what `rename` may answer was measured on local disks and on NFS v3 and v4.1:

===================== ======================================================================
``0``                 published
``EEXIST, ENOTEMPTY`` somebody won; theirs is used if it verifies, else quarantined
``ENOENT``            a resent NFS rename may have been done: look for our own token in the target
``EXDEV, EACCES, …``  `StoreError`, with the remedy; the caller trains on with its own copy
===================== ======================================================================

A directory rename replaces an *empty* directory, so never make one at a final name.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files.faults import store_error
from kcoord.files.reading import read_plain


def write_files(directory: Path, contents: dict[str, bytes], *, durable: bool) -> None:
    """Write named contents below `directory`; `durable`: fsync each, so that they survive a crash."""
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
    """Some file systems cannot do that with a directory, and need not."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def refresh_names(directory: Path) -> None:
    """Make an NFS client that cached a name of `directory` as missing look again: opening it does, `stat` does not.

    Raises OSError, FileNotFoundError too if `directory` itself is cached as missing.
    """
    os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))


def _make(directory: Path) -> None:
    """`mkdir`, never of its parents: where a mount has vanished they would be made on the disk below.

    An NFS client that cached the new name as missing looks again.
    """
    try:
        directory.mkdir()
    except FileExistsError:
        return
    with contextlib.suppress(OSError):  # made it is
        os.utime(directory.parent)


def rename_into_place(
    staging: Path,
    final: Path,
    manifest_name: str,
    is_valid: Callable[[Path], bool | None],
    quarantine: Path,
    *,
    durable: bool,
) -> bool:
    """Publish `staging` at `final`, whose parent's parent exists. True: ours is there. False: another writer's valid one is.

    `is_valid` judges another writer's; one that fails is moved into `quarantine`, one that is gone by then (None) is not. A
    loser's staging directory is removed. Not guaranteed: that the winner is still there when this returns. Raises `StoreError`.
    """
    why = "another's artifact comes and goes there: does something clean this directory?"
    try:
        token = (staging / manifest_name).read_bytes()  # names its writer and moment: nobody else has its like
        _make(final.parent)
        if durable:
            sync_directory(staging)
        for _ in range(3):
            won = _rename(staging, final, manifest_name, token)
            if won:
                if durable:
                    sync_directory(final.parent)
                with contextlib.suppress(OSError):  # published it is
                    os.utime(final.parent)  # an NFS client that cached "missing" looks again
                return True
            valid = is_valid(final)
            if valid:
                shutil.rmtree(staging, ignore_errors=True)
                return False
            if valid is not None:
                why = "three invalid artifacts in a row were found there: check who writes to the directory"
                set_aside(final, quarantine)
    except OSError as error:
        raise store_error(error, final) from error
    raise StoreError(f"{final}: {why}", why)


def _rename(staging: Path, final: Path, manifest_name: str, token: bytes) -> bool:
    try:
        staging.rename(final)
    except OSError as error:
        with contextlib.suppress(OSError):
            refresh_names(
                final.parent
            )  # an NFS client that saw the name missing is not told better by what just failed
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        if error.errno == errno.ENOTDIR and final.parent.is_dir():
            return False  # a file or a symbolic link is there, and no artifact
        if error.errno == errno.ENOENT and _holds(final / manifest_name, token):
            return True
        raise
    return True


def _holds(manifest: Path, token: bytes) -> bool:
    try:
        return read_plain(manifest, len(token)) == token
    except (OSError, ArtifactInvalid):  # a pipe of a stranger's would be waited for
        return False


def set_aside(path: Path, quarantine: Path) -> None:
    """Move a directory out of the way, to be looked at later. Whoever is reading it goes on reading."""
    quarantine.mkdir(parents=True, exist_ok=True)
    try:
        path.rename(quarantine / f"{path.name}-{uuid.uuid4().hex[:12]}")
    except FileNotFoundError:
        return  # another process moved it first
