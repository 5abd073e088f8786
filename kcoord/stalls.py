"""Processes that make no progress: their process tree does not use the CPU.

One that waits for a lock, for a dead NFS server or for a debugger uses none. One that spins looks busy.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)

_PLACE = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_PROC_SUPER_MAGIC = 0x9FA0
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

    def look(self, compiling: Mapping[C, str], now: float) -> list[C]:
        """Those of `compiling` (name → process) that have used less than 1 % of a core for so long. Call it again and again.

        A process is named by its directory in a procfs, which may be another pid namespace's. Reading it takes milliseconds: not
        for the event loop. A process that cannot be seen is never called stalled.
        """
        for name in self._samples.keys() - compiling.keys():
            del self._samples[name]
        stalled, self.working = [], []
        for name, directory in compiling.items():
            used = _used(directory)
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


def _used(directory: str) -> float | None:
    """CPU seconds of a process and all below it, those that have ended included; None if it cannot be seen."""
    try:
        place = os.open(directory, _PLACE)
    except OSError:
        return None
    try:
        if not _is_procfs(place):  # a client may have sent any descriptor
            return None
        first, _, own = _stat("stat", place)
        beside = os.open("..", _PLACE, dir_fd=place)
        try:
            used: dict[int, int] = {}
            below: defaultdict[int, list[int]] = defaultdict(list)
            for name in filter(str.isdigit, os.listdir(beside)):  # noqa: PTH208 - of a descriptor
                with suppress(OSError):  # it has ended
                    pid, parent, used[pid] = _stat(f"{name}/stat", beside)
                    below[parent].append(pid)
        finally:
            os.close(beside)
    except (OSError, ValueError, IndexError):
        return None
    finally:
        os.close(place)
    total, left = own, list(below[first])
    while left:
        pid = left.pop()
        total += used[pid]
        left += below.pop(pid, [])
    return total / os.sysconf("SC_CLK_TCK")


def _stat(name: str, directory: int) -> tuple[int, int, int]:
    """The id and the parent of a process, and its clock ticks with those of its children that have ended (proc(5))."""
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        pid, _, rest = os.read(descriptor, 4096).partition(b" (")
    finally:
        os.close(descriptor)
    fields = rest.rpartition(b") ")[2].split()
    return int(pid), int(fields[1]), sum(map(int, fields[11:15]))


def _is_procfs(descriptor: int) -> bool:
    import ctypes  # agents need it only once a compile is slow

    found = (ctypes.c_long * 64)()  # a `struct statfs`, which is smaller and begins with the type
    return ctypes.CDLL(None).fstatfs(descriptor, found) == 0 and found[0] == _PROC_SUPER_MAGIC
