"""Several launchers of one node: one agent, which ends with the last of them."""

from __future__ import annotations

import json
import sys

import psutil
import pytest

from kcoord.agent.server import Launchers
from tests.support.command import KCOORD
from tests.support.living import agents_of
from tests.support.sandbox import PROGRAMS, Sandbox, Started, eventually, finish

EXEC = (*KCOORD, "exec", "--", "bash", "-c")
RANK = PROGRAMS / "generic_rank.py"


def launcher(sandbox: Sandbox, name: str, then: str = "true", job: str = "the-job") -> Started:
    """`kcoord exec` of a command that waits until the file `name` is there; returns when the command runs."""
    up, gate = sandbox.root / f"{name}-up", sandbox.root / name
    command = f"touch {up}; until [ -e {gate} ]; do sleep 0.05; done; {then}"
    process = sandbox.fork_kcoord(*EXEC, command, KCOORD_JOB=job)
    eventually(lambda: up.exists() or process.poll() is not None)
    return process


def agents(sandbox: Sandbox) -> list[int]:
    return sorted(agent.pid for agent in agents_of(sandbox.processes()))


@pytest.mark.smoke
@pytest.mark.parametrize("end", ["it ends", "it is killed"])
def test_an_agent_outlives_its_launcher_for_the_others_and_ends_with_the_last(sandbox: Sandbox, end: str) -> None:
    first = launcher(sandbox, "first", f"{_rank()} 1")
    others = [launcher(sandbox, f"other{n}", f"{_rank()} 3") for n in range(2)]
    (agent,) = agents(sandbox)
    if end == "it ends":
        (sandbox.root / "first").touch()
    else:
        first.kill()
        (sandbox.root / "first").touch()  # its shell ends, too
    done = finish(first)
    assert " kernels: " not in done.stderr, "it is not the last"
    assert agents(sandbox) == [agent]
    (sandbox.root / "other0").touch()
    done = finish(others[0])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["counters"]["alone"] == 0
    assert " kernels: " not in done.stderr
    assert agents(sandbox) == [agent]
    (sandbox.root / "other1").touch()
    done = finish(others[1])
    assert json.loads(done.stdout)["counters"]["alone"] == 0
    assert "3 kernels: 3 compiled, 4 loaded" in done.stderr, "the last one sums up for all"
    assert not agents(sandbox), "it has ended before its last launcher has"
    assert not list(sandbox.local.glob("*.sock"))


@pytest.mark.parametrize("order", ["the agent's owner first", "the other first"])
def test_each_job_of_a_node_ends_with_its_own_line(sandbox: Sandbox, order: str) -> None:
    jobs = [launcher(sandbox, name, f"{_rank()} {kernels}", name) for kernels, name in ((2, "first"), (3, "second"))]
    assert len(agents(sandbox)) == 1
    in_order = [("first", jobs[0]), ("second", jobs[1])]
    for name, job in in_order if order == "the agent's owner first" else in_order[::-1]:
        (sandbox.root / name).touch()
        lines = [line for line in finish(job).stderr.splitlines() if " kernels: " in line]
        assert [line.endswith(f"kcoord report {name}") for line in lines] == [True], lines
    assert not agents(sandbox)


def test_a_launchers_output_ends_with_it_also_if_its_agent_goes_on(sandbox: Sandbox) -> None:
    """Whoever reads it to its end, as mpirun does, must not wait for the others."""
    first, other = launcher(sandbox, "first"), launcher(sandbox, "other")
    (sandbox.root / "first").touch()
    finish(first)  # reads to the end of both streams
    assert other.poll() is None
    assert len(agents(sandbox)) == 1
    (sandbox.root / "other").touch()
    finish(other)


def test_an_agent_that_nobody_launched_does_not_end_with_launchers(sandbox: Sandbox) -> None:
    agent = sandbox.fork_kcoord(*KCOORD, "agent")
    eventually(lambda: list(sandbox.local.glob("*.sock")) or agent.poll() is not None)
    done = finish(sandbox.fork_kcoord(*EXEC, f"{_rank()} 2"))
    assert "2 kernels: 2 compiled, 0 loaded" in done.stderr
    assert agent.poll() is None
    agent.terminate()
    finish(agent)


def test_an_agent_that_drains_is_not_found_any_more(sandbox: Sandbox) -> None:
    """A launcher that comes then needs one that stays. And one that is killed as it waits for its agent leaves no socket."""
    first = sandbox.fork_kcoord(*EXEC, "touch up; exec sleep 600", KCOORD_JOB="the-job", KCOORD_AGENT_TIMEOUT="1")
    eventually((sandbox.root / "up").exists)
    (agent,) = (psutil.Process(pid) for pid in agents(sandbox))
    agent.suspend()  # it has much to publish
    first.terminate()
    eventually(lambda: not list(sandbox.local.glob("*.sock")), 15)
    assert first.poll() is None, "it waits for its agent"
    second = launcher(sandbox, "second")
    assert len(agents(sandbox)) == 2
    agent.resume()
    finish(first)
    (sandbox.root / "second").touch()
    done = finish(second, 60)
    assert " kernels: " in done.stderr
    assert not list(sandbox.local.glob("*.sock"))


def test_who_is_last() -> None:
    launchers = Launchers(True, "a job")
    assert not launchers.owner_leaves()
    launchers.attend(1, "a job")
    launchers.attend(2, "another")
    launchers.attend(3, "another")
    assert launchers.leaves(1) == (False, False)
    assert launchers.owner_leaves()
    assert launchers.handed_over
    assert not launchers.gone(1)
    assert not launchers.gone(7), "a rank"
    assert launchers.leaves(2) == (False, False)
    assert launchers.leaves(3) == (True, True)
    assert not launchers.gone(2)
    assert launchers.gone(3)


def test_a_launcher_that_a_successor_of_its_agent_does_not_know_leaves_the_line_to_the_owner() -> None:
    assert Launchers(True, "a job").leaves(1) == (False, False)


def test_of_launchers_that_end_at_once_one_is_the_last() -> None:
    others = Launchers(True, "a job")
    others.attend(1, "a job")
    others.attend(2, "a job")
    assert others.owner_leaves()
    assert [others.leaves(1), others.leaves(2)] == [(False, False), (True, True)], "neither has gone yet"
    with_owner = Launchers(True, "a job")
    with_owner.attend(1, "a job")
    assert with_owner.leaves(1) == (False, False)
    assert not with_owner.owner_leaves(), "the other one ends, too, and has been told that it is not the last"


def _rank() -> str:
    return f"{sys.executable} {RANK}"


_MISSPELLED = "there is no setting KCOORD_MAX_WIAT: is KCOORD_MAX_WAIT meant?"


def test_a_setting_that_does_not_exist_is_named_once_by_the_launcher(sandbox: Sandbox) -> None:
    two = f"{_rank()} 1 & {_rank()} 1; wait"
    done = sandbox.run_kcoord(*EXEC, two, KCOORD_MAX_WIAT="7", KCOORD_JOB="the-job")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("KCOORD_MAX_WIAT") == done.stderr.count(_MISSPELLED) == 1, done.stderr


def test_a_setting_that_does_not_exist_is_named_by_the_first_rank_where_there_is_no_launcher(sandbox: Sandbox) -> None:
    second, first = (sandbox.run_kcoord(RANK, "1", KCOORD_MAX_WIAT="7", RANK=rank) for rank in "10")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stderr.count("KCOORD_MAX_WIAT") == first.stderr.count(_MISSPELLED) == 1, first.stderr
    assert "KCOORD_MAX_WIAT" not in second.stderr
    for log in sandbox.local.glob("*.log"):
        assert "KCOORD_MAX_WIAT" not in log.read_text()
