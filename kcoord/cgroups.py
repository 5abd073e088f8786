"""The cores and the memory that this process may use, within its control groups.

``/proc/self/cgroup`` names the groups, of version 2 or 1; a limit of any group above counts as well (cgroups(7)). A container
sees its own group as the root of ``/sys/fs/cgroup``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_SHORTEST = 0.2  # seconds between two looks at the cores; the kernel counts in hundredths


def cores() -> float:
    """Cores that this process may keep busy: its affinity, or less where a group has a quota."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas().values()])


NO_QUOTA = 1e6
"""So many cores are left where there is no quota."""


class IdleCores:
    """The cores that are not busy where this process runs. Low-priority processes (``nice``) keep none busy."""

    def __init__(self) -> None:
        self._before = _Usage.now()
        self._found = float(len(os.sched_getaffinity(0))), min(_quotas().values(), default=NO_QUOTA)

    def look(self) -> tuple[float, float]:
        """Idle cores of this process's affinity, and cores left of its groups' quotas, since the last look but one.

        A quota counts the use of low-priority processes as well.
        """
        now = _Usage.now()
        seconds = now.at - self._before.at
        if seconds >= _SHORTEST:
            idle = max(0.0, now.idle - self._before.idle) / seconds
            quotas = zip(_quotas().values(), now.used, self._before.used, strict=False)
            left = [quota - (used - before) / seconds for quota, used, before in quotas]
            self._found = min(idle, float(len(os.sched_getaffinity(0)))), max(0.0, min(left, default=NO_QUOTA))
            self._before = now
        return self._found


@dataclass(frozen=True)
class _Usage:
    """Seconds: of idle cores, and of the cores used by each group that has a quota."""

    at: float
    idle: float
    used: tuple[float, ...]

    @classmethod
    def now(cls) -> _Usage:
        import psutil  # as below: its import is a tenth of an agent's, and few agents and ranks get here

        try:
            every = psutil.cpu_times(percpu=True)
        except OSError:
            every = []
        here = os.sched_getaffinity(0)
        mine = [times for cpu, times in enumerate(every) if cpu in here] if len(every) == os.cpu_count() else every
        idle = sum(t.idle + getattr(t, "iowait", 0.0) + getattr(t, "nice", 0.0) for t in mine)
        return cls(time.monotonic(), idle, tuple(map(_used, _quotas())))


def _quotas() -> dict[Path, float]:
    """The groups with a quota, and how many cores it is."""
    found = {}
    for group in _groups("cpu"):
        quota = _numbers(group, "cpu.max")
        quota = quota or _numbers(group, "cpu.cfs_quota_us") + _numbers(group, "cpu.cfs_period_us")
        if len(quota) == 2 and min(quota) > 0:
            found[group] = quota[0] / quota[1]
    return found


def _used(group: Path) -> float:
    """Seconds of CPU that `group` has used; 0 where it does not say."""
    try:
        stat = dict(line.split(maxsplit=1) for line in (group / "cpu.stat").read_text().splitlines() if " " in line)
    except OSError:
        stat = {}
    if stat.get("usage_usec", "").isdecimal():
        return int(stat["usage_usec"]) / 1e6
    return next(iter(_numbers(group, "cpuacct.usage")), 0) / 1e9


def free_memory() -> int:
    """Bytes that are free without swapping, and within each group's limit, beyond which the kernel kills a process."""
    import psutil

    free = int(psutil.virtual_memory().available)
    for group in _groups("memory"):
        limit = _numbers(group, "memory.max") or _numbers(group, "memory.limit_in_bytes")
        used = _numbers(group, "memory.current") or _numbers(group, "memory.usage_in_bytes")
        if limit and used:
            free = min(free, max(0, limit[0] - used[0] + _reclaimable(group)))
    return free


def _groups(controller: str) -> Iterator[Path]:
    """This process's group and the groups above it that are visible, of version 2 and of version 1's `controller`."""
    try:
        lines = os.fsdecode(_MEMBERSHIP.read_bytes()).splitlines()
    except OSError:
        return
    for line in lines:
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if not path or (controllers and controller not in controllers.split(",")):
            continue
        root = _ROOT / controller if controllers else _ROOT
        group = root / path.lstrip("/")
        for directory in [group, *group.parents]:
            if directory.is_relative_to(root):
                yield directory


def _numbers(group: Path, name: str) -> list[int]:
    """The numbers of a file; empty if there is none, or it says ``max``."""
    try:
        return [int(word) for word in (group / name).read_text().split()]
    except (OSError, ValueError):
        return []


def _reclaimable(group: Path) -> int:
    """Bytes of cached files, which the kernel can drop; a group's usage counts them."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stats = dict(line.split(maxsplit=1) for line in lines if " " in line)
    text = stats.get("total_inactive_file", stats.get("inactive_file", "0"))
    return int(text) if text.isdecimal() else 0
