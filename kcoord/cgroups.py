"""The cores and the memory that this process may use, within its control groups.

``/proc/self/cgroup`` names the groups, of version 2 or 1; a limit of any group above counts as well (cgroups(7)). A container
sees its own group as the root of ``/sys/fs/cgroup``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def cores() -> float:
    """Cores that this process may keep busy: its affinity, or less where a group has a quota."""
    found = float(len(os.sched_getaffinity(0)))
    for group in _groups("cpu"):
        quota = _numbers(group, "cpu.max")
        quota = quota or _numbers(group, "cpu.cfs_quota_us") + _numbers(group, "cpu.cfs_period_us")
        if len(quota) == 2 and min(quota) > 0:
            found = min(found, quota[0] / quota[1])
    return found


def free_memory() -> int:
    """Bytes that are free without swapping, and within each group's limit, beyond which the kernel kills a process."""
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
