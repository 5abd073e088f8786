"""A background pass of the agent, with a thread of its own for a disk that may hang.

A *chore* is one pass that runs again and again: never twice at once, not before it is due, and after a slow run it rests for a
multiple of the time that the run took. The agent's pulse begins all chores, and one bounded drain ends them.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from kcoord.telemetry.events import Notices, log, tell_if_failed

T = TypeVar("T")

REST = 20  # times the duration of a run: the pause after it, for a slow disk
_SPREAD = 0.2  # of a period, by which each is longer or shorter: nodes that start together do not stay in step


class DiskThread:
    """One thread, which works for one disk, in order. Nothing waits for it to end, since a disk may hang.

    `low_priority`: the thread leaves the CPU to others.
    """

    def __init__(self, name: str, *, low_priority: bool = False) -> None:
        self._pool = ThreadPoolExecutor(1, f"chore {name}", initializer=_lower_priority if low_priority else None)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, or its exception. If this is cancelled, the thread goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def doing(self, work: Callable[[], T]) -> Callable[[], Awaitable[T]]:
        """A coroutine function that runs `work` in this thread."""
        return functools.partial(self.run, work)

    def close(self) -> None:
        """Begin no other work."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Chore:
    """One pass, `work`, begun by `pulse` on the event loop.

    Times in seconds, ± 20 %. `first`: until the first run. `every`: between the beginnings of two runs; a run that returns a
    number of seconds has its next one after these. `rest`: a run that took t seconds is followed by a pause of at least
    ``rest × t``. `wanted` is asked at each pulse. An exception of `work` is told once, and the chore goes on with its next run.

    `last` is the final run, which `drain` makes; without one, `drain` cancels the run that is under way.
    """

    def __init__(
        self,
        name: str,
        thread: DiskThread,
        work: Callable[[], Awaitable[float | None]],
        notices: Notices,
        *,
        first: float = 0.0,
        every: float = 0.0,
        rest: float = 0.0,
        wanted: Callable[[], bool] = lambda: True,
        last: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.name, self.thread = name, thread
        self.ended = asyncio.Event()  # by `drain`
        self._work, self._notices = work, notices
        self._every, self._rest = every, rest
        self._wanted, self._last = wanted, last
        self._run: asyncio.Task[None] | None = None
        self._draining = False
        self._due = time.monotonic() + _about(first)
        self._rested = 0.0  # until then no run begins

    @property
    def under_way(self) -> bool:
        return self._run is not None and not self._run.done()

    def pulse(self, now: float) -> None:
        """Begin a run if one is wanted and due."""
        if self._wanted() and now >= self._due:
            self.begin()

    def run_soon(self) -> None:
        """Begin a run if one is wanted, due or not, but not during the pause of `rest`."""
        if not self.under_way and time.monotonic() >= self._rested and self._wanted():
            self.begin()

    def begin(self) -> None:
        """Begin a run, due or not, unless one is under way or the agent ends."""
        if not self._draining and not self.under_way:
            self._run = asyncio.create_task(self._once())
            self._run.add_done_callback(self._failed)

    async def settled(self) -> None:
        """Wait for the end of the run that is under way."""
        if self._run is not None:
            await asyncio.wait({self._run})

    async def drain(self, seconds: float) -> None:
        """End: finish the run that is under way and make the last one, within `seconds`; then cancel."""
        self._draining = True
        if self._last is None:
            if self._run is not None:
                self._run.cancel()
            end = asyncio.create_task(self.settled())
        else:
            end = asyncio.create_task(self._finish(self._last))
            end.add_done_callback(self._failed)
        try:
            _, late = await asyncio.wait({end}, timeout=seconds)
            if late:
                log.info("%s: not finished within %g s", self.name, seconds)
        finally:
            end.cancel()
            self.ended.set()

    async def _once(self) -> None:
        begun, pause = time.monotonic(), None
        try:
            pause = await self._work()
        finally:
            ended = time.monotonic()
            every = _about(self._every if pause is None else pause)
            self._rested = ended + self._rest * (ended - begun)
            self._due = max(begun + every, self._rested)

    async def _finish(self, last: Callable[[], Awaitable[object]]) -> None:
        await self.settled()
        await last()

    def _failed(self, run: asyncio.Task[None]) -> None:
        tell_if_failed(run, f"{self.name}: a run failed", self._notices.tell)


class Chores:
    """All chores of one agent."""

    def __init__(self, *groups: Iterable[Chore]) -> None:
        self._chores = [chore for group in groups for chore in group]

    def pulse(self) -> None:
        """Begin the runs that are due. Call it about once a second."""
        now = time.monotonic()
        for chore in self._chores:
            chore.pulse(now)

    async def drain(self, seconds: float) -> None:
        """End all chores, side by side, within `seconds`; then their threads begin no other work."""
        try:
            await asyncio.gather(*(chore.drain(seconds) for chore in self._chores))
        finally:
            for chore in self._chores:
                chore.thread.close()


def _about(seconds: float) -> float:
    return seconds * random.uniform(1 - _SPREAD, 1 + _SPREAD)


def _lower_priority() -> None:
    """Lower the priority of this thread alone, as Linux allows."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
