"""What ranks did and when: recorded, delivered, kept on the node and in the store. Real ranks, agents, kills and forks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

import kcoord
from kcoord.agent.chores.chore import Chores
from kcoord.agent.chores.timelines import Timelines
from kcoord.cli.options import agent_status
from kcoord.protocol.identity import Identity
from kcoord.protocol.messages import Deliver
from kcoord.rank.coordinator import Coordinator
from kcoord.rank.telemetry import Spans
from kcoord.report import span_reader
from kcoord.report.timeline import Timeline, load_timeline
from kcoord.settings import Settings
from kcoord.telemetry import span_files
from kcoord.telemetry.events import Notices
from kcoord.telemetry.spans import MOST_AT_ONCE, Process, Span, checked
from tests.support.agents import Node, until
from tests.support.redis_server import RedisServer
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish

RANK = PROGRAMS / "generic_rank.py"
KEY = kcoord.CacheKey.of("test", "kernel", n=1)
GATED = """
import os, time, kcoord
from pathlib import Path
def compile(staging):
    Path(os.environ["GATE"]).with_suffix(".begun").touch()
    while not Path(os.environ["GATE"]).exists():
        time.sleep(0.005)
    (staging / "kernel.bin").write_text("kernel 0" * 100)
key = kcoord.CacheKey.of("test", "k0", n=0)
kcoord.connect().get_or_compile(key, compile, scope=kcoord.Scope.TARGET)
"""


def rank(sandbox: Sandbox, number: int, *arguments: str, **more: str | None) -> subprocess.Popen[str]:
    return sandbox.fork_kcoord(RANK, *arguments, RANK=str(number), KCOORD_JOB="job", **more)


class Gate:
    """A leader whose compile of `k0` ends once `waiters` wait for it on `node`."""

    def __init__(self, sandbox: Sandbox, **more: str) -> None:
        self._path, self._environ = sandbox.root / "gate", {"KCOORD_LOCAL_DIR": str(sandbox.local), **more}
        self.leader = sandbox.fork_kcoord("-c", GATED, GATE=str(self._path), RANK="0", KCOORD_JOB="job", **more)
        eventually(self._path.with_suffix(".begun").exists)

    def open(self, waiters: int, **node: str) -> None:
        settings = Settings.from_environ({**self._environ, **node})

        def waiting() -> int:
            status = agent_status(settings)
            under_way = ("compiling", "waiting for another node")  # and no longer being asked for
            return sum(len(f["waiting"]) for f in status["flights"] if f["state"] in under_way) if status else 0

        eventually(lambda: waiting() == waiters)
        self._path.touch()
        assert finish(self.leader).returncode == 0


def timeline(sandbox: Sandbox, local: str = "local", store: str | None = None) -> Timeline:
    environ = {"KCOORD_LOCAL_DIR": str(sandbox.root / local)}
    if store:
        environ["KCOORD_STORE"] = str(sandbox.root / store)
    try:
        return load_timeline(Settings.from_environ(environ), "job")
    except kcoord.KcoordError:
        return Timeline("job")


def said(timeline: Timeline, number: int) -> list[tuple[str, str]]:
    """Kind and outcome of all that a rank did, in order; without having asked a slow agent before it compiled."""
    return [(s.kind, s.outcome) for s in spans_of(timeline, number) if s.outcome != "lead"]


def spans_of(timeline: Timeline, number: int) -> list[Span]:
    return [s for row in timeline.rows if row.process.rank == number for s in row.spans]


def span(n: int = 0, **changes: Any) -> Span:
    given = {
        "kind": "compile",
        "outcome": "ok",
        "backend": "test",
        "name": f"k{n}",
        "key": f"{n:016x}",
        "begin": 1e9 + n,
    }
    return Span(**{**given, "seconds": 0.5, **changes})


def test_a_leader_compiles_the_others_wait_and_load_and_a_later_rank_only_loads(sandbox: Sandbox) -> None:
    gate = Gate(sandbox)
    others = [rank(sandbox, n, "1") for n in (1, 2)]
    gate.open(2)
    pids = [p.pid for p in (gate.leader, *others)]
    for process in others:
        assert finish(process).returncode == 0
    assert finish(rank(sandbox, 3, "1")).returncode == 0
    eventually(lambda: said(timeline(sandbox), 3), what="the spans of the last rank")
    found = timeline(sandbox)
    assert said(found, 0) == [("compile", "ok")]
    assert said(found, 1) == said(found, 2) == [("wait", "ok"), ("load", "ok")]
    assert said(found, 3) == [("load", "ok")]
    assert [row.process.pid for row in found.rows][:3] == pids
    compile, wait, load = spans_of(found, 0)[-1], *spans_of(found, 1)
    assert compile.begin < wait.begin < compile.end <= wait.end <= load.begin, "one clock, and in this order"
    assert load.saved == pytest.approx(compile.seconds, abs=1e-3)
    assert {s.key for _, s in found.spans()} == {compile.key}
    assert (compile.name, compile.backend) == ("k0", "test")


def test_the_row_of_a_killed_rank_ends_in_what_it_was_at_and_the_next_leader_is_seen(sandbox: Sandbox) -> None:
    begun = sandbox.root / "begun"
    victim = rank(sandbox, 0, "1", "600", BEGUN=str(begun))
    eventually(begun.exists)
    begun.unlink()
    next_one = rank(sandbox, 1, "1", "0.2", BEGUN=str(begun))
    settings = Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.local)})

    def waited_for() -> float:
        """The seconds that the flight has been led, if somebody waits for it."""
        status = agent_status(settings)
        return max((f["seconds"] for f in status["flights"] if f["waiting"]), default=0.0) if status else 0.0

    eventually(waited_for)
    then = waited_for()
    eventually(lambda: waited_for() > then + 0.1, what="the wait is long enough to be one")
    victim.kill()
    victim.communicate()
    assert finish(next_one).returncode == 0
    eventually(lambda: said(timeline(sandbox), 1), what="the next leader's spans")
    found = timeline(sandbox)
    assert said(found, 0) == [("compile", "lost")]
    lost, (wait, compile) = spans_of(found, 0)[-1], spans_of(found, 1)
    assert (wait.kind, wait.outcome, compile.kind, compile.outcome) == ("wait", "lead", "compile", "ok")
    assert lost.name == "k0"
    assert lost.key == compile.key
    assert lost.begin < wait.begin < lost.end < compile.begin + 1


def test_a_failed_compile_and_those_who_find_out_for_themselves(sandbox: Sandbox) -> None:
    coordinator = Coordinator(Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.local), "KCOORD_JOB": "job"}))

    def broken(staging: Path) -> None:
        raise ValueError("no")

    for error in (ValueError, kcoord.CompileFailed):
        with pytest.raises(error):
            coordinator.get_or_compile(KEY, broken, scope=kcoord.Scope.TARGET)
    coordinator.close()
    eventually(lambda: timeline(sandbox).rows)
    (row,) = timeline(sandbox).rows
    assert [(s.kind, s.outcome) for s in row.spans][-2:] == [("wait", "failed"), ("compile", "failed")]
    assert row.process == Process(os.uname().nodename, os.getpid(), None)


def test_a_forked_childs_spans_are_its_own(sandbox: Sandbox) -> None:
    program = """
import os, kcoord
coordinator = kcoord.connect()
def make(n):
    key = kcoord.CacheKey.of("test", f"k{n}", n=n)
    coordinator.get_or_compile(key, lambda s: (s / "f").write_text("x"), scope=kcoord.Scope.TARGET)
make(0)
coordinator._telemetry.spans.add("load", "ok", kcoord.CacheKey.of("test", "parent's own"), 0.0, 0.0)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    make(2)
else:
    make(1)
    coordinator.close()
    os._exit(0)
"""
    process = sandbox.start("-W", "ignore", "-c", program, KCOORD_JOB="job")
    assert finish(process).returncode == 0
    eventually(lambda: sum(s.outcome == "ok" for _, s in timeline(sandbox).spans()) == 4)
    by_pid = {row.process.pid: {s.name for s in row.spans} for row in timeline(sandbox).rows}
    assert by_pid.pop(process.pid) == {"k0", "parent's own", "k2"}
    assert list(by_pid.values()) == [{"k1"}]


def test_two_nodes_are_seen_from_a_third_that_mounts_the_store(sandbox: Sandbox) -> None:
    with RedisServer() as server:
        shared = {"KCOORD_REDIS_URL": server.url, "KCOORD_STORE": str(sandbox.root / "store")}
        one, two, three = ({"KCOORD_LOCAL_DIR": str(sandbox.root / f"local{n}"), **shared} for n in (1, 2, 3))
        gate = Gate(sandbox, **one)
        second = rank(sandbox, 1, "1", **two)
        gate.open(1, **two)
        assert finish(second).returncode == 0
        assert finish(rank(sandbox, 2, "1", **three)).returncode == 0
        for process in sandbox.processes():
            process.send_signal(signal.SIGTERM)
        eventually(lambda: not sandbox.processes(), what="the agents ended, and wrote what they had")
    found = timeline(sandbox, "nowhere", "store")
    assert said(found, 0) == [("compile", "ok")]
    assert said(found, 1) == [("wait", "ok"), ("load", "ok")]
    assert said(found, 2) == [("fetch", "ok"), ("load", "ok")]
    assert len(list((sandbox.root / "store/v2/traces/job").iterdir())) == 3
    assert not list((sandbox.root / "store/v2/staging").iterdir())


def test_what_a_killed_agent_had_written_stays(sandbox: Sandbox) -> None:
    assert finish(rank(sandbox, 0, "1")).returncode == 0
    eventually(lambda: said(timeline(sandbox), 0))
    (agent,) = sandbox.processes()
    agent.kill()
    agent.wait(20)
    assert finish(rank(sandbox, 1, "2")).returncode == 0
    eventually(lambda: said(timeline(sandbox), 1))
    found = timeline(sandbox)
    assert (said(found, 0), said(found, 1)) == ([("compile", "ok")], [("load", "ok"), ("compile", "ok")])


def test_without_an_agent_a_compile_says_that_nobody_coordinated_it_and_why(sandbox: Sandbox) -> None:
    assert finish(rank(sandbox, 0, "1", KCOORD_SPAWN="0")).returncode == 0
    *_, (_, found) = timeline(sandbox).spans()
    assert (found.kind, found.outcome) == ("compile", "alone")
    assert "no agent" in found.note


def test_on_a_node_that_cannot_keep_spans_the_job_goes_on_and_the_living_agent_has_its_figures(
    sandbox: Sandbox,
) -> None:
    (sandbox.local / "traces").write_text("in the way")
    done = finish(rank(sandbox, 0, "3"))
    assert done.returncode == 0
    stats = sandbox.run_kcoord("-c", "from kcoord.cli import main; main()", "stats", "--json").stdout
    assert '"compiles": 3' in stats


# Bounds, and strangers


def test_spans_are_bounded_and_what_is_dropped_is_counted() -> None:
    spans = Spans()
    for _ in range(5000):
        spans.add("load", "ok", KEY, 0.0, 0.0)
    delivered = dropped = 0
    for batch, lost in spans.batches():
        assert len(batch) <= MOST_AT_ONCE
        found, refused = checked(batch)
        assert not refused
        assert len(found) == len(batch)
        delivered, dropped = delivered + len(batch), dropped + lost
        spans.delivered(len(batch), lost)
    assert (delivered, dropped) == (4096, 904)
    assert not spans


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "dance"}, {"outcome": ""}, {"outcome": 3}, {"name": 7}, {"key": "no digest"}, {"key": "ab" * 32},
        {"begin": float("nan")}, {"begin": float("inf")}, {"begin": -1}, {"begin": "x"}, {"seconds": -0.1}, {"seconds": 1e300},
        {"seconds": True}, {"saved": None}, {"aside": 1}, {"note": b"bytes"}, {"source": "elsewhere"},
        {"inside": "x"}, {"count": -1}, {"count": None},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_span_is_left_out_and_counted(changes: dict[str, Any]) -> None:
    bad = span(**changes).to_wire()
    assert checked([bad, span().to_wire(), [], None, bad[:5]]) == ([span()], 4)
    assert checked("nonsense") == ([], 0)


def test_texts_are_cut_and_what_does_not_print_is_replaced() -> None:
    ((found,), _) = checked([span(name="k" * 9999, note="a\0b\x1b[31m\udcff").to_wire()])
    assert len(found.name) == 200
    assert found.note.isprintable()


def test_bad_spans_in_a_delivery_are_counted_as_lost() -> None:
    with Node(job="j") as node:
        node.start()
        with node.wire() as wire:
            wire.hello("j")
            for spans, dropped in (([[]] * 5000, 3), (None, None), ([span().to_wire(), 5], 0)):
                assert wire.ask({"op": "deliver", "spans": spans, "dropped": dropped})["op"] == "done"
            found = wire.ask({"op": "stats", "job": "j"})["figures"]
            assert (found["compiles"], found["dropped"]) == (1, 3 + 5000 + 1)
        until(lambda: any(span_reader.read(p).deliveries for p in node.directory.glob("traces/j/*.spans")))
        with pytest.raises(AssertionError):  # nothing else may come of it
            until(lambda: len(list(load_timeline(node.settings, "j").spans())) != 1, 0.2)


def test_what_a_hostile_client_says_of_itself_leaves_the_file_readable() -> None:
    with Node(job="../..") as node:
        node.start()
        for pid, rank, job in (
            (-5, -1, "../.."),
            (1 << 63, 1 << 63, ".."),
            (1, 1, ""),
            (1, 1, "x" * 5000),
            (1, 1, "\udcff/\0"),
        ):
            with node.wire() as wire:
                wire.send(Identity(pid, rank, None, job).hello())
                wire.frame()
                wire.ask({"op": "deliver", "spans": [span().to_wire()], "dropped": 0})
        until(lambda: sum(p.stat().st_size > 0 for p in node.directory.glob("traces/*/*.spans")) == 5)
        assert {p.parent for p in node.directory.rglob("*.spans")} == set((node.directory / "traces").iterdir())
        for job in ("../..", "..", "", "x" * 5000, "\udcff/\0"):
            assert [s.name for _, s in load_timeline(node.settings, job).spans()] == ["k0"], job


def lines_of(tmp_path: Path, content: bytes) -> span_reader.SpanFile:
    path = tmp_path / "a.spans"
    path.write_bytes(content)
    return span_reader.read(path)


def test_a_torn_tail_is_skipped_at_whatever_byte_it_was_torn(tmp_path: Path) -> None:
    first, second = (span_files.delivery(Process("", 7, n), [span(n)], 2) for n in (0, 1))
    whole = span_files.header("node") + first
    for cut in range(len(second)):
        found = lines_of(tmp_path, whole + second[:cut])
        assert found.deliveries == [(Process("node", 7, 0), [span(0)])]
        assert found.dropped == 2
    assert not lines_of(tmp_path, b"").problem, "an agent that was killed before it could write"


@pytest.mark.parametrize(
    "tail",
    [b"\xc1", msgpack.packb(7), msgpack.packb([[[]]]), msgpack.packb({"pid": -1}), b"\xdd\xff\xff\xff\xff" * 3,
     msgpack.packb({"pid": 1, "rank": "x", "dropped": 0, "spans": []}), b"\x81" * 5000, random.Random(1).randbytes(4000)],
    ids=lambda tail: tail[:8].hex(),
)  # fmt: skip
def test_garbage_in_a_file_takes_nothing_of_what_came_before(tmp_path: Path, tail: bytes) -> None:
    good = span_files.header("node") + span_files.delivery(Process("", 7, 0), [span(0)])
    assert lines_of(tmp_path, good + tail).deliveries == [(Process("node", 7, 0), [span(0)])]
    assert lines_of(tmp_path, tail).problem
    assert lines_of(tmp_path, tail).deliveries == []


# The agent's part


def line(n: int, count: int = 1) -> Deliver:
    return Deliver([span(n, name=f"{'n' * 150}{i}").to_wire() for i in range(count)])


WHO = Identity(5, 0, 0, "job")


async def test_a_full_file_counts_what_follows(tmp_path: Path) -> None:
    timelines = Timelines(None, tmp_path, "agent", Notices())
    for n in range(60):
        timelines.add(WHO, line(n, 1000))
        await timelines._save()
    await Chores(timelines.chores).drain(10)
    (path,) = tmp_path.rglob("*.spans")
    assert path.stat().st_size <= span_files.LARGEST_FILE
    found = span_reader.read(path)
    assert not found.problem
    kept = sum(len(spans) for _, spans in found.deliveries)
    assert kept > 20_000
    assert kept + found.dropped == 60_000


async def test_a_store_that_hangs_holds_up_neither_the_nodes_file_nor_the_end(tmp_path: Path) -> None:
    hangs, asked = threading.Event(), threading.Event()

    class Hung(Timelines):
        def _copy(self, *_: object) -> bool:
            asked.set()
            hangs.wait(60)
            return True

    timelines = Hung(tmp_path / "store", tmp_path / "local", "agent", Notices())
    try:
        timelines.add(WHO, line(0))
        Chores(timelines.chores).pulse()
        while not asked.is_set():
            await asyncio.sleep(0.01)
            Chores(timelines.chores).pulse()
        timelines.add(WHO, line(1))
        begun = time.monotonic()
        await Chores(timelines.chores).drain(1.0)
        assert time.monotonic() - begun < 30
    finally:
        hangs.set()
    (path,) = (tmp_path / "local").rglob("*.spans")
    assert len(span_reader.read(path).deliveries) == 2


async def test_a_disk_that_was_full_for_a_while_loses_nothing(tmp_path: Path) -> None:
    notices = Notices()
    timelines = Timelines(None, tmp_path, "agent", notices)
    (tmp_path / "traces").write_text("in the way")
    timelines.add(WHO, line(0))
    await timelines._save()
    (tmp_path / "traces").unlink()
    timelines.add(WHO, line(1))
    await timelines._save()
    (path,) = tmp_path.rglob("*.spans")
    path.write_bytes(path.read_bytes() + b"torn by a full disk")
    timelines.add(WHO, line(2))
    await timelines._save()
    path.unlink()  # somebody cleans the directory
    timelines.add(WHO, line(3))
    await Chores(timelines.chores).drain(10)
    (path,) = tmp_path.rglob("*.spans")
    found = span_reader.read(path)
    assert not found.problem
    assert [spans[0].begin - 1e9 for _, spans in found.deliveries] == [3]
    assert any("not kept" in notice for notice in notices.since(0)[0])


def test_a_week_later_a_job_is_forgotten_on_the_node_and_what_cannot_be_removed_keeps_nothing_else(
    tmp_path: Path,
) -> None:
    for job, age in (("old", 8), ("older", 99), ("new", 6)):
        span_files.write_own(tmp_path, job, "agent", Process("n", 1, 0), [span().to_wire()], 0)
        os.utime(tmp_path / "traces" / job / "agent.spans", (time.time() - age * 86400,) * 2)
    (tmp_path / "traces/older/gone.spans").symlink_to("/nowhere")
    (tmp_path / "traces/older/directory").mkdir()
    os.utime(tmp_path / "traces/older/directory", (1e9,) * 2)
    span_files.forget_old(tmp_path)
    assert sorted(p.name for p in (tmp_path / "traces").iterdir()) == ["new", "older"]
    assert [p.parent.name for p in (tmp_path / "traces").glob("*/agent.spans")] == ["new"]


async def test_of_a_worker_of_the_pool_its_compiles_count_and_nothing_that_it_loaded(tmp_path: Path) -> None:
    timelines = Timelines(None, tmp_path, "agent", Notices())
    wire = [span(1).to_wire(), span(2, kind="load", saved=5.0).to_wire(), span(3, kind="wait").to_wire()]
    assert [each.kind for each in timelines.add(replace(WHO, pool=True), Deliver(wire))] == ["compile"]
    found = timelines.latest(1)[WHO.job]
    assert (found["requests"], found["compiles"], found["ahead"], found["saved_seconds"]) == (0, 1, 1, 0)
    await Chores(timelines.chores).drain(10)


# The store


async def share(store: Path, local: Path, notices: Notices | None = None) -> None:
    """One agent's life: it keeps a span, and copies its file."""
    timelines = Timelines(store, local, "z-agent", notices or Notices())
    timelines.add(WHO, line(0))
    await Chores(timelines.chores).drain(10)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store/v2/staging").mkdir(parents=True)
    return tmp_path / "store"


async def test_a_link_in_the_store_does_not_choose_where_an_agent_writes(tmp_path: Path, store: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (store / "v2/traces").mkdir()
    (store / "v2/traces/job").symlink_to(tmp_path / "elsewhere")
    notices = Notices()
    await share(store, tmp_path / "local", notices)
    assert not list((tmp_path / "elsewhere").iterdir())
    assert "or a link inside the store" in notices.since(0)[0][0]
    assert not list((store / "v2/staging").iterdir())
