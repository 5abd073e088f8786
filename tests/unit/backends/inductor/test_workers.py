"""Torch's compile workers: one pool for the ranks of a node, and what becomes of it."""

from __future__ import annotations

import ast
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

from kcoord.errors import KcoordError
from kcoord.report.timeline import load_timeline
from kcoord.settings import Settings
from tests.support.living import words_of
from tests.support.sandbox import PROGRAMS, WITH_TORCH, Sandbox, eventually, sandboxed
from tests.support.shared_servers import fork_server

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(300)

WORKERS = 2
IMPORT = 120.0  # seconds: the bound of an import of torch


class Rank:
    """A rank that does what it is told."""

    def __init__(self, box: Sandbox, rank: int, **more: str) -> None:
        number = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "KCOORD_JOB": "job"}
        environ = box.env(**{**number, "TORCHINDUCTOR_COMPILE_THREADS": str(WORKERS), **more})
        self._errors = box.root / f"errors-{rank}"
        reads, self._asks = os.pipe()
        answers, writes = os.pipe()
        with self._errors.open("wb") as errors:
            streams = reads, writes, errors.fileno()
            server = fork_server((WITH_TORCH,))
            program = [str(PROGRAMS / "compile_jobs.py")]
            self.process = server.start(program, environ, box.root, streams, start_new_session=True)
        os.close(reads)
        os.close(writes)
        self._answers = os.fdopen(answers)

    def ask(self, expression: str) -> Any:
        os.write(self._asks, f"{expression}\n".encode())
        answer = self._answers.readline()
        assert answer, self.end()
        return ast.literal_eval(answer)

    def pool(self) -> psutil.Process:
        """The process whose workers do this rank's jobs."""
        return psutil.Process(self.ask("do(jobs.where)")[1])

    def holds(self, box: Sandbox, name: str) -> None:
        """Have a job begin that does not end before the file `name` exists."""
        self.ask(f"soon(jobs.held, {str(box.root / name)!r})")
        eventually((box.root / f"{name}.began").exists, IMPORT)

    def end(self) -> str:
        """Kill it, if it runs; its standard error."""
        self.process.kill()
        self.process.wait(60)
        return self._errors.read_text()

    def close(self) -> None:
        self.end()
        os.close(self._asks)
        self._answers.close()


@contextmanager
def job(box: Sandbox, *variables: dict[str, str]) -> Iterator[list[Rank]]:
    ranks = [Rank(box, number, **more) for number, more in enumerate(variables)]
    try:
        yield ranks
    finally:
        for each in ranks:
            each.close()


Shared = tuple[Sandbox, Rank, Rank]


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with sandboxed() as box, job(box, {}, {}) as (first, second):
        yield box, first, second


def is_of_the_node(pool: psutil.Process) -> bool:
    return any("worker_pool" in word for word in words_of(pool))


def pools_in(box: Sandbox) -> list[psutil.Process]:
    """All that have begun; a shell that starts one has its words, too."""
    return [each for each in box.processes() if is_of_the_node(each) and "python" in words_of(each)[0]]


def test_ranks_share_one_pool_whose_jobs_are_those_of_their_rank(shared: Shared) -> None:
    box, first, second = shared
    pool = first.pool()
    assert is_of_the_node(pool)
    assert second.pool() == pool
    assert len(pool.children()) == WORKERS
    for turn in range(3):
        for number, rank in enumerate((first, second)):
            assert rank.ask("do(jobs.where)")[2] == str(number)
            assert rank.ask(f"do(jobs.compiled, '{number} {turn}')") is True
    settings = Settings.from_environ({"KCOORD_LOCAL_DIR": str(box.local)})

    def compiles() -> set[tuple[int | None, str]]:
        with suppress(KcoordError):  # there is none yet
            spans = load_timeline(settings, "job").spans()
            return {(process.rank, span.name) for process, span in spans if span.compiled}
        return set()

    expected = {(number, f"{number} {turn}") for number in range(2) for turn in range(3)}
    eventually(lambda: compiles() == expected, what="the time line has each compile as its rank's")


def test_a_variable_that_a_job_sets_is_not_set_for_another_ranks(shared: Shared) -> None:
    box, first, second = shared
    first.holds(box, "one")  # so all jobs have the other worker
    worker, _ = first.ask("do(jobs.sets, 'TRITON_LIBDEVICE_PATH')")
    assert first.ask("do(jobs.sets, 'TRITON_LIBDEVICE_PATH')") == (worker, "set"), "as in stock"
    assert second.ask("do(jobs.sets, 'TRITON_LIBDEVICE_PATH')") == (worker, None)
    (box.root / "one").touch()
    assert first.ask("kept.pop().result(timeout=60)") > 0


def test_workers_end_once_all_ranks_have_quiesced(shared: Shared) -> None:
    _, first, second = shared
    workers = set(first.pool().children())
    second.ask("do(jobs.where)")
    first.ask("pool().quiesce()")
    assert first.pool().children(), "after the message"
    assert set(first.pool().children()) == workers
    first.ask("pool().quiesce()")
    second.ask("pool().quiesce()")
    eventually(lambda: not any(each.is_running() for each in workers), what="the workers have ended")
    assert second.ask("do(jobs.where)")[2] == "1"


def test_a_worker_that_is_killed_costs_no_rank_its_job(shared: Shared) -> None:
    box, first, second = shared
    second.holds(box, "release")
    times = str(box.root / "times")
    assert first.ask(f"do(jobs.dies, {times!r}, 1)") == 2
    assert "BrokenProcessPool" in first.ask(f"do(jobs.dies, {times + '-always'!r}, 99)")
    (box.root / "release").touch()
    assert second.ask("kept.pop().result(timeout=60)") > 0
    assert first.pool() == second.pool()
    eventually(lambda: len(first.pool().children()) == WORKERS, what="those that did a job alone have ended")


def test_equal_jobs_of_two_ranks_take_one_worker(shared: Shared) -> None:
    box, first, second = shared
    first.holds(box, "equal")
    second.ask(f"soon(jobs.held, {str(box.root / 'equal')!r})")
    assert second.ask("do(jobs.where)")[2] == "1", "by the other worker"
    (box.root / "equal").touch()
    assert first.ask("kept.pop().result(timeout=60)") > 0
    assert second.ask("kept.pop().result(timeout=60)") > 0


BOUNDED = """
from kcoord.backends.inductor import worker_pool

worker_pool._executor_of = lambda count: count
for free in (0, 3 * worker_pool._WORKER, 100 * worker_pool._WORKER):
    worker_pool.free_memory = lambda: free
    print(worker_pool.Workers(8)._started())
"""


def test_there_are_as_many_workers_as_memory_is_free_for_and_at_least_one(sandbox: Sandbox) -> None:
    done = sandbox.run_forked("-c", BOUNDED)
    assert (done.stdout.split(), done.returncode) == (["1", "3", "8"], 0), done.stderr


def test_the_pool_outlives_the_rank_that_started_it_and_no_process_outlives_the_last_rank(sandbox: Sandbox) -> None:
    with job(sandbox, {}, {}) as (first, second):
        pool = first.pool()
        second.holds(sandbox, "release")
        os.killpg(first.process.pid, signal.SIGKILL)
        (sandbox.root / "release").touch()
        worker = second.ask("kept.pop().result(timeout=60)")
        assert psutil.Process(worker).parent() == second.pool() == pool
        child = psutil.Process(second.ask("jobs.leave_child()"))  # it keeps the rank's ends of pipes open
        second.end()
        eventually(lambda: not pool.is_running(), what="the pool has ended")
        child.kill()
    eventually(lambda: not sandbox.processes(), what="nothing is left")
    assert not list(sandbox.root.glob("tmp/*/*.sock"))


def test_jobs_of_a_pool_that_is_killed_are_done_by_a_pool_of_their_rank(sandbox: Sandbox) -> None:
    with job(sandbox, {}, {}) as (first, second):
        killed = first.pool()
        assert second.pool() == killed
        first.holds(sandbox, "release")
        workers = killed.children()
        killed.kill()
        (sandbox.root / "release").touch()
        eventually(lambda: not any(each.is_running() for each in workers), what="they have ended with their pool")
        worker = first.ask("kept.pop().result(timeout=60)")
        assert psutil.Process(worker).parent() not in (None, killed)
        assert second.ask("pool().wakeup()") is None
        pools = first.pool(), second.pool()
        assert not any(map(is_of_the_node, pools))
        assert len(set(pools)) == 2
        assert [each.parent().pid for each in pools] == [first.process.pid, second.process.pid]
        assert first.end().count("the node's compile workers have ended: this rank starts its own") == 1


def test_a_pool_that_dies_as_it_starts_costs_no_job(sandbox: Sandbox) -> None:
    with job(sandbox, {}) as (rank,):
        rank.ask("soon(jobs.where)")
        eventually(lambda: [each.kill() for each in pools_in(sandbox)], what="a pool has begun, and was killed")
        assert rank.ask("kept.pop().result(timeout=60)")[2] == "0"
        assert not is_of_the_node(rank.pool())


def test_other_variables_have_another_pool_and_a_rank_alone_has_torchs(shared: Shared) -> None:
    box, first, _ = shared
    kind = "type(pool().process).__name__"
    alone, off = {"WORLD_SIZE": "1"}, {"KCOORD_SHARE_WORKERS": "0"}
    far = box.root / "tmp" / ("far" * 30)  # too far for a socket's path
    far.mkdir()
    with job(box, {"TRITON_DEBUG": "1"}, alone, off, {"TMPDIR": str(far)}) as ranks:
        assert [rank.ask(kind) for rank in (first, *ranks)] == ["Membership"] * 2 + ["Popen"] * 3
        assert "torch's compile workers are this rank's own: AF_UNIX path too long" in ranks[-1].end()
        another = ranks[0].pool()
        assert is_of_the_node(another)
        assert another != first.pool()
