"""How long a compile may take before it counts as slow, and whether a process gets anywhere."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kcoord.agent.expectations import Expectations
from kcoord.packs.recipe import Recipe
from kcoord.stalls import Stalls
from tests.support.agents import until

_SPINS = "print(flush=True)\nwhile True: pass"
_SLEEPS = "import time\nprint(flush=True)\ntime.sleep(1000)"
_HAS_A_CHILD_THAT_SPINS = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', {_SPINS!r}])
print(flush=True)
child.wait()
"""


def test_a_compile_is_slow_when_it_takes_a_multiple_of_the_longest_of_its_key_or_recipe() -> None:
    found = Expectations(3.0, 1.0)
    for took in (2.0, 5.0, 0.1):
        found.learn("key", took)
    found.learn("recipe", 7.0)
    assert found.slow_after("key", None) == 15.0
    assert found.slow_after("key", "recipe") == 21.0
    assert found.slow_after("another key", "recipe") == 21.0


def test_nothing_is_slow_before_the_least_time() -> None:
    found = Expectations(3.0, 10.0)
    found.learn("key", 0.5)
    assert found.slow_after("key") == 10.0


def test_nothing_is_slow_that_nobody_has_compiled_before() -> None:
    found = Expectations(2.0, 1.0)
    found.learn("key", 30.0)
    assert found.slow_after("another key", None) == math.inf


def test_a_factor_of_zero_means_never() -> None:
    found = Expectations(0.0, 1.0)
    found.learn("key", 1.0)
    assert found.slow_after("key") == math.inf


def test_a_profile_teaches() -> None:
    found = Expectations(2.0, 1.0)
    recipe = Recipe("triton", "model.kernels", "Attention.forward", [], "cuda:90", 7.0, 1)
    found.learn_all([recipe])
    assert found.slow_after("key", recipe.digest) == 14.0


def test_compiles_are_forgotten_oldest_first_and_memory_is_bounded() -> None:
    found = Expectations(2.0, 1.0)
    for n in range(100_050):
        found.learn(f"key {n}", 1.0 + n)
    assert len(found._longest) == 100_000
    assert found.slow_after("key 50") == 2 * 51
    assert found.slow_after("key 49") == math.inf


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def start(code: str, started: list[subprocess.Popen[str]]) -> int:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    started.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    return process.pid


def test_a_process_that_sleeps_stalls_and_one_that_works_itself_or_in_a_child_does_not(
    started: list[subprocess.Popen[str]],
) -> None:
    pids = {name: start(code, started) for name, code in
            {"spins": _SPINS, "sleeps": _SLEEPS, "has a child": _HAS_A_CHILD_THAT_SPINS}.items()}  # fmt: skip
    stalls: Stalls[str] = Stalls(4.0)
    now = 0.0
    directories = {name: f"/proc/{pid}" for name, pid in pids.items()}
    assert stalls.look(directories, now) == []
    assert stalls.working == [], "nothing is known yet"
    for _ in range(4):
        for process in ("spins", "has a child"):
            before = _cpu(pids[process])
            until(lambda p=pids[process], b=before: _cpu(p) > b + 0.05)  # type: ignore[misc]
        now += 1.0
        found = stalls.look(directories, now)
        assert sorted(stalls.working) == ["has a child", "spins"]
    assert found == ["sleeps"]


def _cpu(pid: int) -> float:
    import psutil

    process = psutil.Process(pid)
    return sum(sum(p.cpu_times()[:2]) for p in (process, *process.children()))


def test_a_process_that_ended_is_called_nothing(started: list[subprocess.Popen[str]]) -> None:
    pid = start(_SLEEPS, started)
    stalls: Stalls[str] = Stalls(1.0)
    stalls.look({"it": f"/proc/{pid}"}, 0.0)
    os.kill(pid, signal.SIGKILL)
    started[0].wait()
    assert stalls.look({"it": f"/proc/{pid}"}, 10.0) == []


def test_what_is_not_compiled_any_more_is_forgotten() -> None:
    stalls: Stalls[str] = Stalls(1.0)
    stalls.look({"it": "/proc/self"}, 0.0)
    stalls.look({}, 1.0)
    assert not stalls._samples
