"""Reads files that other users may write to: plain files of a bounded size, and msgpack of a bounded number of values."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgpack

from kcoord.errors import ArtifactInvalid

_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8} | {
    0xD4 + power: 1 + (1 << power) for power in range(5)
}
"""Bytes that follow the first one of a value."""
_SIZED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)} | {
    0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)
}  # fmt: skip
"""Bytes of the length of a text, of bytes or of an extension, and how much it leaves out."""
_HOLDING = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Bytes of the count of an array or a map, and values for each."""


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
    """The status of a file, fresh from the server of a network file system. Raises OSError, also for a link."""
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


def unpack(content: bytes, most: int, **options: Any) -> Any:
    """As `msgpack.unpackb`, of a document of at most `most` values: texts, numbers, lists and maps, with those inside.

    An empty list is one byte in a file and 56 in memory, so values are counted before any is made. Raises ValueError for more of
    them, and for anything that is not msgpack.
    """
    if len(content) > most and not _has_at_most(content, most):  # a value has at least a byte
        raise ValueError(f"it holds more than {most} values")
    try:
        return msgpack.unpackb(content, **options)
    except (msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ValueError(f"it is not msgpack: {error}") from error


def _has_at_most(content: bytes, most: int) -> bool:
    """Reads the first bytes of each value, as the format's specification has them (https://msgpack.org). True of a torn one."""
    at, seen, expected, end = 0, 0, 1, len(content)
    while expected and at < end:
        first = content[at]
        at, seen, expected = at + 1, seen + 1, expected - 1
        if first <= 0x7F or first >= 0xE0:
            pass
        elif first <= 0x8F:
            expected += 2 * (first & 0x0F)
        elif first <= 0x9F:
            expected += first & 0x0F
        elif first <= 0xBF:
            at += first & 0x1F
        elif first in _FIXED:
            at += _FIXED[first]
        elif first in _SIZED:
            width, more = _SIZED[first]
            at += width + more + int.from_bytes(content[at : at + width], "big")
        elif first in _HOLDING:
            width, each = _HOLDING[first]
            expected += each * int.from_bytes(content[at : at + width], "big")
            at += width
        if seen + expected > most:
            return False
    return True
