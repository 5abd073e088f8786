"""Compilers that hang: their process tree does not use the CPU.

A process that waits for a lock, for a dead NFS server or for a debugger uses none. One that spins looks busy: a hedge, after the
time that is expected of it, or its lease's limit ends that one's lead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import psutil

from kcoord.agent.chores.chore import Chore, Lane
from kcoord.telemetry.events import Notices

C = TypeVar("C", bound=Hashable)

_IDLE = 0.01  # of one core: heartbeat threads and watchdogs of a training process use less than that


@dataclass
class _Sample:
    since: float
    used: float


class Stalls(Generic[C]):
    """Finds processes that make no progress for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: dict[C, _Sample] = {}

    def look(self, compiling: Mapping[C, int], now: float) -> list[C]:
        """Those of `compiling` (name → process id) that have used less than 1 % of a core for so long. Call it again and again.

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
    """Looks at the processes of ``compiling()`` four times in `seconds`, and calls ``stalled(c)`` for each that stalls.

    `seconds` of 0: never.
    """

    def __init__(
        self,
        seconds: float,
        compiling: Callable[[], Mapping[C, int]],
        stalled: Callable[[C], None],
        notices: Notices,
    ) -> None:
        self._compiling, self._stalled = compiling, stalled
        self._stalls: Stalls[C] = Stalls(seconds)
        self._lane = Lane("stalls")
        self.chores = [Chore("stalls", self._lane, self._look, notices, every=seconds / 4)] if seconds else []

    async def _look(self) -> None:
        compiling, now = dict(self._compiling()), time.monotonic()
        for found in await self._lane.run(lambda: self._stalls.look(compiling, now)):
            self._stalled(found)


def _used(pid: int) -> float | None:
    """CPU seconds of a process and all below it, those that have ended included; None if it cannot be seen."""
    try:
        process = psutil.Process(pid)
        return sum(sum(p.cpu_times()[:4]) for p in (process, *process.children(recursive=True)))
    except psutil.Error:
        return None
