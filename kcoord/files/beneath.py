"""Removing and renaming in directories that others may write to, such as a store's: by descriptors, so that no link leads out.

Below `root` each directory on the way to a name is opened in turn, and none of them may be a symbolic link. The name then
belongs to an open directory: a link that is put in a directory's place meanwhile changes nothing. A link at `root`, or above it,
is followed: a user chose it. Without `root` the directory that holds the name is found by its path, as one of this user's own.

Every function but `mark_used` raises OSError: NotADirectoryError where a link, or a file, is in a directory's place.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARKED_AFTER = 86400.0  # seconds
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEEPEST = 64  # directories of a tree that is removed, each an open file; ours have three at most


@contextmanager
def opened(directory: Path, root: Path | None = None) -> Iterator[int]:
    """A descriptor of `directory`, `root` or a directory below it, for calls with ``dir_fd``. It cannot be listed."""
    below = () if root is None else directory.relative_to(root).parts
    descriptor = os.open(directory if root is None else root, _PLACE)
    try:
        for name in below:
            above, descriptor = descriptor, os.open(name, _PLACE | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(above)
        yield descriptor
    finally:
        os.close(descriptor)


def check(directory: Path, root: Path) -> None:
    """Raises NotADirectoryError if a link is in the place of `directory`, or on the way to it from `root`.

    Call it before something is made there by its path. Not guaranteed: that nobody puts a link there just afterwards.
    """
    with opened(directory, root):
        pass


def rename(source: Path, target: Path, root: Path | None = None) -> None:
    """`os.rename`. Both are below `root`."""
    with opened(source.parent, root) as there, opened(target.parent, root) as here:
        os.rename(source.name, target.name, src_dir_fd=there, dst_dir_fd=here)


def link(source: Path, target: Path, root: Path | None = None) -> None:
    """`os.link`, of a link itself. Both are below `root`."""
    with opened(source.parent, root) as there, opened(target.parent, root) as here:
        os.link(source.name, target.name, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)


def unlink(path: Path, root: Path | None = None) -> None:
    with opened(path.parent, root) as parent:
        os.unlink(path.name, dir_fd=parent)


def rmdir(path: Path, root: Path | None = None) -> None:
    with opened(path.parent, root) as parent:
        os.rmdir(path.name, dir_fd=parent)


def mkdir(path: Path, root: Path | None = None, mode: int = 0o777) -> None:
    """Make the one directory `path`, and no parent: where a mount has vanished they would be made on the disk below."""
    with opened(path.parent, root) as parent:
        os.mkdir(path.name, mode, dir_fd=parent)


def lstat(path: Path, root: Path | None = None) -> os.stat_result:
    with opened(path.parent, root) as parent:
        return os.stat(path.name, dir_fd=parent, follow_symlinks=False)


def touch(path: Path, root: Path | None = None) -> None:
    """Set the times of `path` to now; a link's own."""
    with opened(path.parent, root) as parent:
        os.utime(path.name, dir_fd=parent, follow_symlinks=False)


def mark_used(path: Path, root: Path) -> None:
    """Tell retention that `path` is in use, unless somebody has within a day. Raises nothing: it may be another user's."""
    with suppress(OSError):
        if time.time() - lstat(path, root).st_mtime > MARKED_AFTER:
            touch(path, root)


def touched(directory: Path, root: Path | None = None) -> float:
    """The file system's own time now, in seconds, by touching `directory`: a full disk would refuse a new file."""
    with opened(directory, root) as descriptor:
        os.utime(".", dir_fd=descriptor)
        return os.stat(".", dir_fd=descriptor).st_ctime


def listed(directory: Path, root: Path | None = None) -> Iterator[tuple[str, os.stat_result]]:
    """The names in `directory`, and the status of each, no link followed. A name that is removed meanwhile is left out."""
    with opened(directory, root) as place:
        readable = os.open(".", _LIST, dir_fd=place)
        try:
            with os.scandir(readable) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        yield entry.name, entry.stat(follow_symlinks=False)
        finally:
            os.close(readable)


def remove(path: Path, root: Path | None = None) -> bool:
    """Remove a file, or a directory with all that is in it, as far as possible. False: something stays. Raises nothing."""
    with suppress(OSError), opened(path.parent, root) as parent:
        _remove(path.name, parent)
        return True
    return False


def _remove(name: str, parent: int, depth: int = 0) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=parent)
        return
    if depth == _DEEPEST:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name)
    directory = os.open(name, _LIST, dir_fd=parent)
    try:
        for inner in os.listdir(directory):  # noqa: PTH208 - of a descriptor
            with suppress(OSError):  # files that an NFS client holds open (.nfsXXXX) go next time
                _remove(inner, directory, depth + 1)
    finally:
        os.close(directory)
    os.rmdir(name, dir_fd=parent)
