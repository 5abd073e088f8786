"""Operating system errors as `StoreError`, one line that names the path and the remedy."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kcoord.errors import StoreError

_REMEDIES = {
    errno.EXDEV: "it is on another file system than its staging directory: make it one directory of one file system",
    errno.EACCES: "permission denied: let this user read and write it",
    errno.EPERM: "not permitted: let this user read and write it",
    errno.EROFS: "it is on a read-only file system: mount it read-write, or unset it",
    errno.ENOSPC: "its file system is full: free space, or run 'kcoord gc' (--local for a local directory)",
    errno.EDQUOT: "the quota is used up: free space, or run 'kcoord gc' (--local for a local directory)",
    errno.EEXIST: "it is a file: name a directory",
    errno.ENOENT: "it is missing: create it, or mount it",
    errno.ENOTDIR: "a part of its path is a file, or a link inside the store: name a directory",
    errno.ESTALE: "its NFS handle is stale: mount it again",
    errno.EIO: "input/output error: look at the file system's log",
    errno.ENAMETOOLONG: "its path is too long: use a shorter one",
}


_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}
_WRONG_PATH = {errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG}  # does not pass while the job runs


def is_of_a_disk(error: BaseException) -> bool:
    """True for an error that a disk raises which is full, over quota, read-only or broken."""
    return isinstance(error, OSError) and error.errno in _DISK


def store_error(error: OSError, where: Path) -> StoreError:
    """`error` as one line that names the path and the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, error.strerror or str(error))
    if error.errno == errno.ENOSPC and has_no_inodes(where):
        remedy = "its file system has no inodes left: remove files, or run 'kcoord gc' (--local for a local directory)"
    return StoreError(f"{where}: {remedy}", remedy, passing=error.errno not in _WRONG_PATH)


def has_no_inodes(where: Path) -> bool:
    """True if the disk below `where`, or below the last directory on the way to it, takes no more files, whatever their size."""
    for path in (where, *where.parents):
        try:
            disk = os.statvfs(path)
        except OSError:
            continue
        return disk.f_files > 0 and disk.f_ffree == 0
    return False


@contextmanager
def store_errors(where: Path) -> Iterator[None]:
    """Raise an OSError of the block as `store_error(error, where)`."""
    try:
        yield
    except OSError as error:
        raise store_error(error, where) from error


def fault_of(root: Path, error: StoreError) -> str:
    """The subject of a notice about `error`: equal for all files that one fault of one disk hits."""
    return f"{root}: {error.remedy}"
