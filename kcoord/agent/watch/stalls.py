"""Whether a compiler gets anywhere: its process tree uses the CPU, or it hangs.

A process that waits for a lock, for a dead NFS server or for a debugger uses none. One that spins looks busy: what ends that
one's lead is the time that is expected of it (a hedge), and its lease's limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import psutil

from kcoord.telemetry.events import Notices, log

C = TypeVar("C", bound=Hashable)

_IDLE = 0.01  # of one core: heartbeat threads and watchdogs of a training process use less than that


@dataclass
class _Sample:
    since: float
    used: float


class Stalls(Generic[C]):
    """`seconds` without progress are a stall."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: dict[C, _Sample] = {}

    def look(self, compiling: Mapping[C, int], now: float) -> list[C]:
        """Which of `compiling`, a process id by a name of one's own, have used less than 1 % of a core for so long.

        Reads /proc, which takes milliseconds: not for the event loop. A process that cannot be seen is never called stalled.
        """
        for name in self._samples.keys() - compiling.keys():
            del self._samples[name]
        stalled = []
        for name, pid in compiling.items():
            used = _used(pid)
            if used is None:
                continue
            sample = self._samples.get(name)
            took = now - sample.since if sample else 0.0
            if sample is None or abs(used - sample.used) > _IDLE * max(took, self._seconds / 4):
                self._samples[name] = _Sample(now, used)
            elif took >= self._seconds:
                stalled.append(name)
        return stalled


class StallWatch(Generic[C]):
    """Looks at what ``compiling()`` names four times in `seconds`, in a thread, and tells ``stalled(c)`` of each that stalls.

    `seconds` of 0: never.
    """

    def __init__(
        self,
        seconds: float,
        compiling: Callable[[], Mapping[C, int]],
        stalled: Callable[[C], None],
        notices: Notices,
    ) -> None:
        self._every, self._compiling, self._stalled, self._notices = seconds / 4, compiling, stalled, notices
        self._stalls: Stalls[C] = Stalls(seconds)
        self._next = 0.0
        self._looking: asyncio.Task[None] | None = None

    def pulse(self, now: float) -> None:
        """Begin a look if one is due, and none is under way. Call it about once a second, or oftener."""
        if not self._every or now < self._next or (self._looking is not None and not self._looking.done()):
            return
        self._next = now + self._every
        compiling = dict(self._compiling())
        self._looking = asyncio.create_task(self._look(compiling, now))
        self._looking.add_done_callback(self._looked)

    async def _look(self, compiling: Mapping[C, int], now: float) -> None:
        for found in await asyncio.get_running_loop().run_in_executor(None, self._stalls.look, compiling, now):
            self._stalled(found)

    def _looked(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._notices.tell(f"an error in the agent, please report it: {type(error).__name__}: {error}")
            log.error("it was not seen whether a compile stalls", exc_info=error)


def _used(pid: int) -> float | None:
    """CPU seconds of a process and all below it, those that have ended included; None if it cannot be seen."""
    try:
        process = psutil.Process(pid)
        return sum(sum(p.cpu_times()[:4]) for p in (process, *process.children(recursive=True)))
    except psutil.Error:
        return None
