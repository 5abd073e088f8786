"""Processes that make no progress: their process tree does not use the CPU.

One that waits for a lock, for a dead NFS server or for a debugger uses none. One that spins looks busy.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

_IDLE = 0.01  # of one core: heartbeat threads and watchdogs of a training process use less than that


@dataclass
class _Sample:
    since: float
    used: float


class Stalls(Generic[C]):
    """Finds processes that make no progress for `seconds`. `working`: those that were seen to make some by the latest look."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._samples: dict[C, _Sample] = {}
        self.working: list[C] = []

    def look(self, compiling: Mapping[C, int], now: float) -> list[C]:
        """Those of `compiling` (name → process id) that have used less than 1 % of a core for so long. Call it again and again.

        Reads /proc, which takes milliseconds: not for the event loop. A process that cannot be seen is never called stalled.
        """
        for name in self._samples.keys() - compiling.keys():
            del self._samples[name]
        stalled, self.working = [], []
        for name, pid in compiling.items():
            used = _used(pid)
            if used is None:
                continue
            sample = self._samples.get(name)
            took = now - sample.since if sample else 0.0
            if sample is None or abs(used - sample.used) > _IDLE * max(took, self._seconds / 4):
                self._samples[name] = _Sample(now, used)
                if sample is not None:
                    self.working.append(name)
            elif took >= self._seconds:
                stalled.append(name)
        return stalled


def _used(pid: int) -> float | None:
    """CPU seconds of a process and all below it, those that have ended included; None if it cannot be seen."""
    import psutil  # agents need it only once a compile is slow

    try:
        process = psutil.Process(pid)
        return sum(sum(p.cpu_times()[:4]) for p in (process, *process.children(recursive=True)))
    except psutil.Error:
        return None
