"""Threads for a file system that may hang: what waits for them is bounded, and those that hang are not joined by ever more."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from kcoord.errors import LeaseUnavailable
from kcoord.files.faults import (
    store_error,
)
from kcoord.leases.base import monotonic, within

T = TypeVar("T")

COMMAND_TIMEOUT = 4.0  # seconds; as long as a command of Redis may take
_THREADS = 8
_MOST_HANGING = 4


class FileThreads:
    """Threads that work below `root`, which messages name."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pool = ThreadPoolExecutor(_THREADS, "lease-files")
        self._busy: dict[int, float] = {}  # what threads are at, and since when
        self._jobs = itertools.count()

    @property
    def busy(self) -> int:
        return len(self._busy)

    def check(self) -> None:
        """Raises `LeaseUnavailable` while too many threads hang: then one more would hang as well."""
        now = monotonic()
        if sum(now - since > COMMAND_TIMEOUT for since in list(self._busy.values())) >= _MOST_HANGING:
            raise LeaseUnavailable(f"{self._root}: it has not answered for {COMMAND_TIMEOUT:g} s: look at its server")

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises. Cancelled, this ends; the thread goes on."""
        job = next(self._jobs)

        def run() -> T:
            self._busy[job] = monotonic()
            try:
                return work()
            finally:
                del self._busy[job]

        return await asyncio.get_running_loop().run_in_executor(self._pool, run)

    async def bounded(self, command: Awaitable[T]) -> T:
        """Raises `LeaseUnavailable`, which ends with the remedy, for an OSError and after `COMMAND_TIMEOUT`."""
        try:
            return await within(COMMAND_TIMEOUT, command)
        except asyncio.TimeoutError:
            raise LeaseUnavailable(f"{self._root}: no answer in {COMMAND_TIMEOUT:g} s: look at its server") from None
        except OSError as error:
            raise LeaseUnavailable(str(store_error(error, self._root))) from error

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
