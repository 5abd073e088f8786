"""Threads for a file system that may hang: a bounded number at a time. One that hangs is counted, and never joined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from kcoord.errors import StoreError

T = TypeVar("T")


class Paused(StoreError):
    """No thread was begun for a use of the file system."""


class Silent(StoreError):
    """The file system has not answered a use for `seconds`. Its thread was left behind."""

    def __init__(self, root: Path, seconds: float) -> None:
        remedy = f"it has not answered for {round(seconds, 1):g} s: look at its server and its mount"
        super().__init__(f"{root}: {remedy}", remedy, passing=True)


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a thread of its own, which a dead NFS server may hold for ever: an agent ends without joining it."""
    return asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), work)


class BoundedThreads:
    """Threads for the file system at `root`: `abreast` uses at a time; the others wait for their turn, in order.

    A use that has had its thread for `patience` seconds is *stuck*; the wait for its turn does not count. It ends with `Silent`,
    another thread takes its place, and `paused` is set: each use whose turn comes ends with `Paused`, until the owner clears it.
    """

    def __init__(self, root: Path, *, abreast: int, patience: float) -> None:
        self.root, self._abreast, self._patience = root, abreast, patience
        self.paused = False
        self.stuck = 0  # threads that have not come back in time
        self._turns, self._pool = asyncio.Semaphore(abreast), ThreadPoolExecutor(abreast)
        self._uses: set[asyncio.Task[Any]] = set()  # those that have a thread

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, or its exception. If this is cancelled, a thread that has begun goes on."""
        await self._turns.acquire()
        if self.paused:
            self._turns.release()
            raise Paused(f"{self.root}: it is not used now", passing=True)
        use = asyncio.create_task(self._run(work))
        self._uses.add(use)
        use.add_done_callback(self._ended)
        await asyncio.wait({use})
        return use.result()

    def close(self) -> None:
        """Begin no other use; nobody waits for those that have begun."""
        self.paused = True
        self._pool.shutdown(wait=False)

    async def _run(self, work: Callable[[], T]) -> T:
        try:
            thread = asyncio.get_running_loop().run_in_executor(self._pool, work)
            if not (await asyncio.wait({thread}, timeout=self._patience))[0]:
                self.stuck += 1
                thread.add_done_callback(self._is_back)
                self.paused = True
                self._pool.shutdown(wait=False)  # its other threads finish their work
                self._pool = ThreadPoolExecutor(self._abreast)
                raise Silent(self.root, self._patience)
            return thread.result()
        finally:
            self._turns.release()

    def _is_back(self, thread: asyncio.Future[Any]) -> None:
        self.stuck -= 1
        _seen(thread)

    def _ended(self, use: asyncio.Task[Any]) -> None:
        self._uses.discard(use)
        _seen(use)


def _seen(outcome: asyncio.Future[Any]) -> None:
    """asyncio logs no error of `outcome`, although nobody may wait for it."""
    if not outcome.cancelled():
        outcome.exception()
