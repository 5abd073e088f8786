"""One job of eight ranks that suffers a node's death, an agent's drain and a Redis that is rolled, and what came of it."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.cluster.proof.cluster import LAUNCHER, RANKS, TRAIN, WORLD, Cluster, Node
from tests.support.sandbox import eventually, finish

KERNELS, SECONDS_EACH = 160, 0.3
JOB = "train-faults"


@dataclass(frozen=True)
class Compile:
    """`ends` is when its files were written; None if it was cut short. `life`: 1 of a rank that was started again."""

    kernel: int
    rank: int
    life: int
    begins: float
    ends: float | None


@dataclass(frozen=True)
class Wait:
    """From a rank's question to its answer, a compile of its own included."""

    kernel: int
    rank: int
    begins: float
    ends: float


@dataclass(frozen=True)
class Fault:
    """In monotonic seconds. `under_way`: kernels that were being compiled when it began, or while it lasted."""

    name: str
    begins: float
    ends: float
    came: str
    under_way: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    """Kernels that were made by a node that vanished before it had them in the store."""


@dataclass
class Story:
    """What happened. `began` is when the ranks were started, `ended` when the last was done."""

    began: float = 0.0
    ended: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    compiles: list[Compile] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    spans: int = 0
    page: str = ""
    back: tuple[float, str] = (0.0, "")
    """When the ranks of the node that had vanished were started again, and what came before."""

    @property
    def made(self) -> Counter[int]:
        """How often each kernel was compiled to the end."""
        return Counter(c.kernel for c in self.compiles if c.ends is not None)

    @property
    def cut_short(self) -> list[int]:
        return sorted(c.kernel for c in self.compiles if c.ends is None)

    @property
    def duplicates(self) -> list[int]:
        return sorted(kernel for kernel, times in self.made.items() for _ in range(times - 1))

    @property
    def longest_wait(self) -> Wait:
        return max(self.waits, key=lambda w: w.ends - w.begins)

    @property
    def lost(self) -> frozenset[int]:
        return frozenset().union(*(f.lost for f in self.faults))

    def fault_of(self, kernel: int) -> Fault | None:
        """Why it was compiled again: it was lost, or there was a fault while it was being compiled."""
        lost = (f for f in self.faults if kernel in f.lost)
        return next(lost, None) or next((f for f in self.faults if kernel in f.under_way), None)

    def rows(self) -> list[list[str]]:
        """A short table: seconds since the ranks were started, what happened, what came of it."""
        found = []
        for fault in self.faults:
            again = len([k for k in self.duplicates if self.fault_of(k) is fault])
            came = f"{fault.came}; compiled again for it: {again}"
            came += f" ({len(fault.lost)} had not reached the store)" if fault.lost else ""
            found.append([f"{fault.begins - self.began:.1f}", fault.name, came])
        longest = self.longest_wait
        found.append([f"{self.back[0] - self.began:.1f}", "train-1 is back with a new pod and its ranks", self.back[1]])
        return [
            *sorted(found, key=lambda row: float(row[0])),
            [f"{self.ended - self.began:.1f}", f"all {WORLD} ranks have all {KERNELS} kernels, with the right bytes",
             f"{sum(self.made.values())} compiles to the end, {len(self.cut_short)} were cut short"],
            [f"{longest.begins - self.began:.1f}", "the longest wait of a rank for a kernel",
             f"{longest.ends - longest.begins:.1f} s"],
        ]  # fmt: skip


def job_with_faults(cluster: Cluster) -> Story:
    """At its end Redis coordinates its agents again, and then they are drained."""
    story = Story()
    notes = cluster.notes / JOB
    notes.mkdir()
    notes.chmod(0o1777)
    here, there = cluster.nodes
    lives = [0, 0]

    def compiles() -> list[Compile]:
        return list(_compiles(_notes(notes)))

    def until_compiling(node: Node, least: int, what: str) -> None:
        """At least `least` kernels were made, and this node's ranks compile others."""

        def happened() -> bool:
            found = compiles()
            at_it = [
                c for c in found if c.ends is None and (c.rank // RANKS, c.life) == (node.number, lives[node.number])
            ]
            return len(at_it) > 1 and sum(c.ends is not None for c in found) >= least

        eventually(happened, 60, what)

    @contextmanager
    def fault(name: str, came: Callable[[], str]) -> Iterator[None]:
        begins = time.monotonic()
        yield
        story.faults.append(Fault(name, begins, time.monotonic(), came()))

    for node in cluster.nodes:
        _pod_with_sidecar(node)
    story.began = time.monotonic()
    trainers = [_start_ranks(node, notes) for node in cluster.nodes]

    until_compiling(here, 8, "the job compiles")
    with fault("SIGTERM to train-0's agent, a new one is started", lambda: "the next agent serves"):
        here.drain_sidecar()
        here.start_sidecar()

    # seconds after its ranks began; a node that vanishes sooner is not in the report
    of_train_1 = "v2/traces/*/train-1-*.spans"
    eventually(lambda: list(cluster.exported.glob(of_train_1)), what="train-1's time line has begun")
    until_compiling(there, 32, "the job compiles on, on the node that is about to vanish")
    with fault("train-1 vanishes: its link, its agent, its ranks", lambda: f"{len(saved)} kernels were in the store"):
        there.vanish()
        saved = _in_store(cluster)
    trainers[1].communicate(timeout=20)
    back = time.monotonic()
    there.come_back()
    _pod_with_sidecar(there)
    lives[1] = 1
    trainers[1] = _start_ranks(there, notes, LIFE="1")
    story.back = time.monotonic(), f"its new pod starts {time.monotonic() - back:.1f} s after that"

    until_compiling(there, 64, "the node that is back compiles")
    with fault("Redis is rolled: stopped, started empty", lambda: ""):
        made = sum(c.ends is not None for c in compiles())
        cluster.redis.stop()
        until_compiling(there, made + 2 * WORLD, "the job compiles on without Redis")
        cluster.redis.start()

    for trainer in trainers:
        done = finish(trainer)
        assert done.returncode == 0, done.stderr
        story.ranks += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    story.ended = time.monotonic()
    for node in cluster.nodes:
        eventually(lambda n=node: n.status()["coordinates"] == "Redis", 30, "Redis coordinates again")  # type: ignore[misc]
        node.drain_sidecar()
    read = _notes(notes)
    story.compiles, story.waits = list(_compiles(read)), list(_waits(read))
    first_life = [c for c in story.compiles if (c.rank // RANKS, c.life) == (there.number, 0)]
    kernels = _kernels(cluster)
    lost = {c.kernel for c in first_life if c.ends is not None} - {kernels[digest] for digest in saved}
    drained, vanished, rolled = story.faults
    back = max(_told_at(node.logs[-1], "coordination by Redis is back") for node in cluster.nodes)
    rolled = replace(rolled, ends=back, came=f"used again {back - rolled.begins:.1f} s after it was stopped")
    story.faults = [
        replace(f, under_way=_under_way(story.compiles, f))
        for f in (drained, replace(vanished, lost=frozenset(lost)), rolled)
    ]
    return story


def read_back(cluster: Cluster, story: Story) -> None:
    """What `kcoord report` and `kcoord trace` say of the job, from the store."""
    node, page, trace = cluster.nodes[0], cluster.temporary / "report.html", cluster.temporary / "trace.json"
    done = node.run("kcoord-agent", ["kcoord", "report", JOB, "--json", "-o", str(page)])
    assert done.returncode == 0, done.stderr
    story.report, story.page = json.loads(done.stdout), page.read_text()
    done = node.run("kcoord-agent", ["kcoord", "trace", JOB, "--json", "-o", str(trace)])
    assert done.returncode == 0, done.stderr
    story.spans = json.loads(done.stdout)["spans"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert len([e for e in events if e["ph"] == "X"]) == story.spans


def _in_store(cluster: Cluster) -> set[str]:
    return {path.name for path in cluster.exported.glob("v2/objects/??/*")}


def _kernels(cluster: Cluster) -> dict[str, int]:
    """Which kernel each artifact of the store is. All must be whole."""
    found = {}
    for digest in _in_store(cluster):
        fetched = cluster.store.fetch(digest)
        assert fetched is not None, digest
        found[digest] = int(fetched[1]["kernel.bin"].split()[1])
    return found


def _told_at(log: str, what: str) -> float:
    """When an agent's log says so, in monotonic seconds; the first moment of all if it does not."""
    line = next((line for line in log.splitlines() if what in line), "")
    if not line:
        return 0.0
    when = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    return when - time.time() + time.monotonic()


def _pod_with_sidecar(node: Node) -> None:
    """A new pod, up to where its trainer starts."""
    node.new_pod("indexed-job", {})
    node.start_sidecar()


def _start_ranks(node: Node, notes: Path, **more: str) -> Any:
    ranks = [sys.executable, str(LAUNCHER), str(node.number * RANKS), str(RANKS), str(WORLD), str(TRAIN), str(KERNELS)]
    ranks[0] = node.pod.python
    settings = {"NOTES": str(notes), "SECONDS_EACH": str(SECONDS_EACH), "KCOORD_JOB": JOB, **more}
    return node.start("trainer", ["kcoord", "exec", "--", *ranks], **settings)


Noted = tuple[str, str, int, float]
"""Whose (a rank's life), what, which kernel, when."""


def _notes(directory: Path) -> list[Noted]:
    found = []
    for path in directory.iterdir():
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            what, kernel, when = line.split()
            found.append((path.name, what, int(kernel), float(when)))
    return found


def _pairs(notes: list[Noted], first: str, last: str) -> Iterator[tuple[int, int, int, float, float | None]]:
    """Kernel, rank, life, when `first` and when `last` was noted of it in one life of a rank."""
    for (who, kernel), group in itertools.groupby(
        sorted(notes, key=lambda n: (n[0], n[2], n[3])), lambda n: (n[0], n[2])
    ):
        times = {what: when for _, what, _, when in group}
        if first in times:
            rank, _, life = who.partition("-")
            yield kernel, int(rank), int(life), times[first], times.get(last)


def _compiles(notes: list[Noted]) -> Iterator[Compile]:
    yield from (Compile(*pair) for pair in _pairs(notes, "begins", "made"))


def _waits(notes: list[Noted]) -> Iterator[Wait]:
    for kernel, rank, _, begins, ends in _pairs(notes, "asks", "has"):
        if ends is not None:
            yield Wait(kernel, rank, begins, ends)


def _under_way(compiles: list[Compile], fault: Fault) -> frozenset[int]:
    """A compile that was cut short ended with its node, at the latest."""
    found = set()
    for compile in compiles:
        ends = compile.ends if compile.ends is not None else compile.begins + SECONDS_EACH
        if compile.begins < fault.ends and ends > fault.begins:
            found.add(compile.kernel)
    return frozenset(found)
