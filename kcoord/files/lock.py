"""A lock between the processes of a node that is worth waiting for, and not worth failing for."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from kcoord.interruption import let_through

_log = logging.getLogger("kcoord")


@contextlib.contextmanager
def locked(path: Path, patience: float) -> Iterator[None]:
    """Hold the flock of the file `path` in this block, or do without one that cannot be had in `patience` seconds.

    Not guaranteed, therefore: that no other process is in such a block. The file stays.
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
