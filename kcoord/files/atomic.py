"""Small files that many processes write: each is replaced whole or not at all, and tells whether it is torn.

A directory of such files is not locked. A file that replaces others is there before they are removed; a listing may still miss
both.

A *staging name* states the host, the process and the pid namespace of its owner, so that a sweep knows whose it was.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from kcoord.files import beneath
from kcoord.files.faults import store_errors
from kcoord.files.rename import sync_directory, write_file
from kcoord.interruption import let_through

_CHECK = hashlib.sha256().digest_size  # bytes between a file's first line and its body
LAYOUT = "v2"
"""The directory that holds all of a store but its marker; its name is the version of the layout."""

_log = logging.getLogger("kcoord")


def staging_name() -> str:
    """A unique name for a staging directory, which states its owner: ``<host>-<pid>-<token>``.

    The token begins with `place`: hosts, and containers of one host, may share a name, and then pids.
    """
    return f"{os.uname().nodename}-{os.getpid()}-{place()}{uuid.uuid4().hex[:12]}"


def place() -> str:
    """Eight hex digits for this boot of this kernel and this pid namespace; within it a pid names one process at a time."""
    return _place(os.getpid())


@functools.lru_cache(maxsize=1)
def _place(pid: int) -> str:
    """`pid`, our own, is the key of the cache: a forked child may be in another namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return uuid.uuid4().hex[:8]  # unique, so that no process judges the owner by its pid
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]


def replace_file(
    path: Path,
    content: bytes,
    staging: Path | None = None,
    root: Path | None = None,
    *,
    durable: bool = False,
) -> None:
    """Make `content` the file at `path`. It is written to `staging` first, a directory of the same file system.

    Without `staging`, to a hidden file beside `path`. `durable`: the content and the name survive a crash. No directory is made:
    where a mount has vanished it would be made on the disk below. Both lie below `root` (`kcoord.files.beneath`). Raises OSError;
    nothing is left in `staging` then.
    """
    fresh = path.with_name(f".{staging_name()}") if staging is None else staging / f"{staging_name()}.part"
    staged = True
    if root is not None:
        beneath.check(fresh.parent, root)
    try:
        write_file(fresh, content, durable=durable)
        beneath.rename(fresh, path, root)
        staged = False
        if durable:
            sync_directory(path.parent)
    finally:
        if staged:
            with contextlib.suppress(OSError):
                beneath.unlink(fresh, root)


def save(directory: Path, name: str, content: bytes, earlier: Path | None = None) -> Path:
    """Write `content` as the file `name` in `directory`, which is made, durably; returns its path. Raises `StoreError`.

    `earlier`, a file whose content this one includes, is removed afterwards, if it is in this directory.
    """
    path = directory / name
    with store_errors(directory):
        root = directory.parents[2] if directory.parents[1].name == LAYOUT else directory.parents[1]  # a user chose it
        root.mkdir(parents=True, exist_ok=True)
        for place in (*reversed(directory.relative_to(root).parents[:-1]), directory.relative_to(root)):
            with contextlib.suppress(FileExistsError):
                beneath.mkdir(root / place, root)
        replace_file(path, content, root=root, durable=True)
        if earlier is not None and earlier.parent == directory and earlier != path:
            with contextlib.suppress(FileNotFoundError):
                beneath.unlink(earlier, root)
    return path


def paths_of(directory: Path, suffix: str) -> list[Path]:
    """The files there, sorted; none if there is no such directory. Raises OSError."""
    try:
        return sorted(p for p in directory.iterdir() if p.suffix == suffix and not p.name.startswith("."))
    except FileNotFoundError:
        return []


def written_at(path: Path) -> float:
    """Seconds of the file system's clock; 0.0 for a file that is gone: its writer has just replaced it by a larger one."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def with_check(head: bytes, body: bytes) -> bytes:
    """A file's content: a line that names its format, the SHA-256 of its body, and the body."""
    return head + hashlib.sha256(body).digest() + body


def body_of(head: bytes, content: bytes) -> bytes:
    """Raises ValueError if `content` is torn, or has another format than `head` names."""
    start = len(head) + _CHECK
    body = content[start:]
    if content[:start] != head + hashlib.sha256(body).digest():
        raise ValueError("it is torn, or another version's")
    return body


@contextlib.contextmanager
def locked(path: Path, patience: float) -> Iterator[None]:
    """Hold the flock of the file `path` in this block, or go on without it after `patience` seconds.

    Not guaranteed: that no other process is in such a block. The file stays.
    """
    from filelock import FileLock  # slow to import, and a warm process never comes here

    lock = FileLock(path, mode=0o600)  # another user who could open it could hold it
    try:
        lock.acquire(timeout=max(0.0, patience))
    except (OSError, NotImplementedError) as error:  # a time-out is an OSError; no flock is NotImplementedError
        let_through(error)
        _log.debug("not waiting for another process: %s", error)
    try:
        yield
    finally:
        try:
            lock.release()
        except OSError as error:
            let_through(error)
