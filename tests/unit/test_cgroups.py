"""The cores and the memory of a container, as its control groups limit them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kcoord import cgroups as limits


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limits_count(version: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {
        1: ("cpu/job", "memory/job", "cpu.cfs_quota_us", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("job/step", "job/step", "cpu.max", "memory.max", "memory.current"),
    }
    cpu, memory, quota, most, used = names[version]
    for directory in (cpu, memory):
        (tmp_path / directory).mkdir(parents=True, exist_ok=True)
    here = tmp_path / cpu if version == 1 else (tmp_path / cpu).parent  # a limit above counts as well
    if version == 1:
        (here / quota).write_text("50000\n")
        (here / "cpu.cfs_period_us").write_text("100000\n")
    else:
        (here / quota).write_text("50000 100000\n")
        (tmp_path / cpu / quota).write_text("max 100000\n")
    (tmp_path / memory / most).write_text(f"{8 << 20}\n")
    (tmp_path / memory / used).write_text(f"{7 << 20}\n")
    (tmp_path / memory / "memory.stat").write_text(f"anon 5\ninactive_file {2 << 20}\n")
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/job\n1:cpu,cpuacct:/job\n" if version == 1 else "0::/job/step\n")
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    monkeypatch.setattr(limits, "_MEMBERSHIP", membership)
    assert limits.cores() == 0.5
    assert limits.free_memory() == 3 << 20


@pytest.mark.parametrize("text", [b"nonsense\n", b"0::/\xff\n", b"\n", b"7:\n"])
def test_a_group_that_cannot_be_read_is_no_limit(text: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else the agent would not start."""
    (tmp_path / "membership").write_bytes(text)
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    monkeypatch.setattr(limits, "_MEMBERSHIP", tmp_path / "membership")
    assert limits.cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("file", ["cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"])
@pytest.mark.parametrize("text", ["50000\n", "1 2 3\n", "0 0\n", ""])
def test_a_quota_that_says_half_is_no_limit(
    file: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    monkeypatch.setattr(limits, "_MEMBERSHIP", tmp_path / "membership")
    assert limits.cores() == len(os.sched_getaffinity(0))


def test_without_a_containers_limits_the_machines_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "_MEMBERSHIP", tmp_path / "none")
    assert limits.cores() == len(os.sched_getaffinity(0))
    assert limits.free_memory() > 1 << 20


def looks(monkeypatch: pytest.MonkeyPatch, usages: list[limits._Usage]) -> list[tuple[float, float]]:
    monkeypatch.setattr(limits._Usage, "now", lambda: usages.pop(0))
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    cores = limits.IdleCores()
    return [cores.look() for _ in range(len(usages))]


def test_idle_cores_are_those_of_the_time_since_the_last_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_quotas", dict)
    usages = [limits._Usage(0.0, 100.0, ()), limits._Usage(2.0, 105.0, ()), limits._Usage(2.1, 105.0, ())]
    assert looks(monkeypatch, usages) == [(2.5, limits.NO_QUOTA), (2.5, limits.NO_QUOTA)], "a moment says nothing"


def test_what_is_left_of_a_quota_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "_quotas", lambda: {tmp_path: 3.0, tmp_path / "outer": 8.0})
    usages = [limits._Usage(0.0, 0.0, (10.0, 10.0)), limits._Usage(2.0, 8.0, (14.0, 24.0))]
    assert looks(monkeypatch, usages) == [(4.0, 1.0)]


@pytest.mark.parametrize(
    ("file", "text"), [("cpu.stat", "usage_usec 2500000\nuser_usec 1\n"), ("cpuacct.usage", "2500000000\n")]
)
def test_what_a_group_has_used_is_read_of_both_versions(tmp_path: Path, file: str, text: str) -> None:
    assert limits._used(tmp_path) == 0.0
    (tmp_path / file).write_text(text)
    assert limits._used(tmp_path) == 2.5


def test_low_priority_work_keeps_no_core_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [SimpleNamespace(user=9.0, idle=1.0, iowait=2.0, nice=3.0)] * (os.cpu_count() or 1)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: times)
    assert limits._Usage.now().idle == 6.0 * len(os.sched_getaffinity(0))


def test_a_machine_that_does_not_tell_has_no_idle_core(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(percpu: bool) -> None:
        raise PermissionError

    monkeypatch.setattr(psutil, "cpu_times", fails)
    assert limits._Usage.now().idle == 0.0
