"""Reads files that other users may write to: plain files of a bounded size, and nothing else."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from kcoord.errors import ArtifactInvalid


def read_plain(
    path: str | Path,
    most: int,
    *,
    afresh: bool = False,
    opened: Callable[[os.stat_result], object] = lambda found: None,
) -> bytes:
    """The content of a file of at most `most` bytes. `afresh`: past this host's page cache, as far as possible.

    ``opened(status)`` is called before the first byte is read.

    Raises `ArtifactInvalid` for a symbolic link, for any other special file (a pipe does not block), and for a larger file, of
    which nothing is read; OSError as the file system does.
    """
    descriptor = _opened(path)
    try:
        found = _checked(path, descriptor, most, afresh)
        opened(found)
        content = os.read(descriptor, found.st_size + 1)
        if len(content) < found.st_size:  # a signal, or a file above 2 GiB
            content += _rest(descriptor, found.st_size - len(content))
        return content
    except OSError as error:
        error.filename = error.filename or os.fspath(path)
        raise
    finally:
        os.close(descriptor)


def open_plain(path: str | Path, most: int, *, afresh: bool = False) -> BinaryIO:
    """A file of at most `most` bytes, opened as `read_plain` opens it, to be read piece by piece. Raises as that does."""
    descriptor = _opened(path)
    try:
        _checked(path, descriptor, most, afresh)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def status_of(path: str) -> os.stat_result:
    """The status of a file, of which a client of a network file system asks the server. Raises OSError, also for a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def open_unwaiting(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """An ``opener`` for `open` that does not block on a pipe. Check the kind of the file before reading it."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _opened(path: str | Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise ArtifactInvalid(f"{path} is no plain file") from error
        raise


def _checked(path: str | Path, descriptor: int, most: int, afresh: bool) -> os.stat_result:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise ArtifactInvalid(f"{path} is no plain file")
    if found.st_size > most:
        raise ArtifactInvalid(f"{path} has {found.st_size} bytes, more than the {most} that it may have")
    if afresh:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return found


def _rest(descriptor: int, count: int) -> bytes:
    chunks = []
    while count > 0 and (chunk := os.read(descriptor, count)):
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)
