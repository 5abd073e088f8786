"""The machine's cache of values that are costly to compute and depend on files alone, such as their hashes.

A changed `Stamp` shows that a file changed; the file is not read for it. An entry in ``<local_dir>/toolchain/`` holds a value
and the stamps of its files. One process computes it while the others wait. Entries only save work: one that is missing, torn or
another user's is computed again, and if the disk refuses, or a process hangs, every process computes for itself.

Not seen: a file rewritten with its old size and mtime on a file system without change times; on NFS, a change that
the client's attribute cache does not show yet, and one within seconds of a look if the server's clock is late.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from kcoord.errors import StoreError
from kcoord.files.atomic import body_of, locked, staging_name, with_check
from kcoord.files.private import make_own, make_private
from kcoord.interruption import let_through

T = TypeVar("T")

Stamp = tuple[int, int, int, int]
"""Inode, size, mtime and ctime (ns). No device: a mount's number changes with every boot, and ctime cannot be set back."""

_patience = [60.0]  # seconds that this process may still wait for others, for all entries together
_RACY = 2_000_000_000  # ns, the coarsest clock of a file system: a younger file may change and keep its stamp
_FORMAT = b"kcoord-kept-2\n"

_log = logging.getLogger("kcoord")
_ours: set[Path] = set()  # local directories that this process has found to be this user's alone


def stamp_of(found: os.stat_result) -> Stamp:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def is_settled(stamp: Stamp, now: int) -> bool:
    """True if a change after `now` (ns since the epoch) gives the file another stamp: the check of git's "racy" index."""
    _, _, mtime, ctime = stamp
    return ctime < now - _RACY and not abs(mtime - now) <= _RACY


def hash_file(path: str | bytes | os.PathLike[str]) -> tuple[str, Stamp | None]:
    """The SHA-256 of a file, and its stamp, or None if it may change without a new stamp. Raises OSError."""
    now = time.time_ns()
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a plain path: a tree has thousands
        stamp = stamp_of(os.fstat(file.fileno()))  # before the first byte: a change during the read gives another
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return digest, stamp if is_settled(stamp, now) else None


def cached(local_dir: Path, name: str, load: Callable[[Any], T | None], compute: Callable[[Any], tuple[T, Any]]) -> T:
    """The value of the entry `name`, or a new one, computed in one process of this machine at a time.

    ``load(entry)`` returns the value, or None if the entry is outdated. ``compute(entry)`` gets the last entry (None: there is
    none) and returns the value and the new entry of plain values (None: it must not be cached). Raises what these two raise;
    not guaranteed: that `compute` runs in one process alone.
    """
    path = _entry_path(local_dir, name)
    if path is None:
        return compute(None)[0]
    entry = _read(path)
    value = None if entry is None else load(entry)
    if value is not None:
        return value
    with _locked(path):
        entry = _read(path)
        value = None if entry is None else load(entry)
        if value is not None:
            return value
        value, entry = compute(entry)
        if entry is not None:
            _write(path, entry)
    return value


def kept(local_dir: Path, name: str) -> Any:
    """The entry `name` as some process of this machine kept it; None if there is none."""
    path = _entry_path(local_dir, name)
    return None if path is None else _read(path)


def keep(local_dir: Path, name: str, entry: Any) -> None:
    """Make plain values the entry `name`. Not guaranteed: that another process's is not replaced, or that the disk takes it."""
    path = _entry_path(local_dir, name)
    if path is not None:
        _write(path, entry)


def _entry_path(local_dir: Path, name: str) -> Path | None:
    """The path of an entry; None if other users could write there, or nobody can."""
    if local_dir not in _ours:
        try:
            make_private(local_dir)
            make_own(local_dir / "toolchain")
        except (StoreError, OSError) as error:
            _log.debug("nothing is cached: %s", error)
            return None
        _ours.add(local_dir)
    return local_dir / "toolchain" / name


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    started = time.monotonic()
    with locked(path.with_name(f"{path.name}.lock"), _patience[0]):
        _patience[0] -= time.monotonic() - started
        yield


def _read(path: Path) -> Any:
    try:
        with open(path, "rb", opener=_open_own) as file:
            body = body_of(_FORMAT, file.read())
    except (OSError, ValueError) as error:  # a ValueError: it is torn, or another version's
        let_through(error)
        return None
    return msgpack.unpackb(body, strict_map_key=False)


def _open_own(path: str, flags: int) -> int:
    """Open a plain file that belongs to this user or root, and that nobody else may write to. Raises OSError."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid in (os.geteuid(), 0) and not found.st_mode & 0o022:
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "it is not this user's own", path)


def _write(path: Path, entry: Any) -> None:
    part = path.with_name(f"{staging_name()}.part")  # an agent's sweep removes it if this process is killed
    try:
        content = with_check(_FORMAT, msgpack.packb(entry))
        part.touch(mode=0o600, exist_ok=False)  # whatever the umask: see `_open_own`
        part.write_bytes(content)
        part.replace(path)
    except (OSError, OverflowError) as error:  # a time of after the year 2554 has no encoding
        _log.debug("%s is not cached: %s", path, error)
        with contextlib.suppress(OSError):
            part.unlink()
