"""A job of two nodes with two ranks each that compiles batch after batch, so that one job can suffer several faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from kcoord.artifacts.store import Store
from kcoord.settings import Settings
from tests.support import processes
from tests.support.agents import Wire
from tests.support.command import KCOORD
from tests.support.forkserver import Forked
from tests.support.sandbox import PROGRAMS, Sandbox, eventually

KERNELS = 8  # of a batch
NODES = 2
RANKS = 2  # of a node
TTL = 2.0  # seconds
RECHECK = 1.8  # seconds; the least after which a waiter that nobody wakes asks again
BACK_WITHIN = 20.0  # seconds after its return Redis coordinates again


@dataclass(frozen=True)
class Batch:
    """What became of one: how often each kernel was compiled, and when kernels were served (monotonic seconds)."""

    compiles: dict[int, int]
    by_rank: list[list[float]]

    @property
    def served(self) -> list[float]:
        return [moment for rank in self.by_rank for moment in rank]

    def longest_wait_after(self, moment: float) -> float:
        """The most seconds after `moment` that went by for a rank without a kernel being served."""
        waits = []
        for rank in self.by_rank:
            times = [moment, *(t for t in rank if t > moment)]
            waits += [after - before for before, after in pairwise(times)]
        return max(waits)

    @property
    def total(self) -> int:
        return sum(self.compiles.values())

    def progress_after(self, moment: float) -> float:
        """Seconds until the first kernel was served after `moment`."""
        return min(t for t in self.served if t > moment) - moment


@dataclass(frozen=True)
class Begun:
    """A compile has begun, at a moment in monotonic seconds."""

    kernel: int
    node: int
    when: float


class Job:
    """Each node is ``kcoord exec`` with an agent of its own; a store lies between them. Leaving it ends it, with exit code 0.

    `wrap` is put before a node's command: `wrap[node]` may lead into a namespace. `lost`: nodes whose end is the test's doing.
    `store_here`: where this process finds the store that they share.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        url: str,
        *,
        wrap: list[list[str]] | None = None,
        store_here: Path | None = None,
        ttl: float = TTL,
        **more: str,
    ) -> None:
        self.directory = sandbox.root / "batches"
        self.directory.mkdir()
        self.store = Store(store_here or sandbox.root / "store")
        self._batches = 0
        self._settings: list[Settings] = []
        self.nodes: list[subprocess.Popen[bytes] | Forked] = []
        self.lost: set[int] = set()
        self._logs = [sandbox.root / f"node{n}.log" for n in range(NODES)]
        for node in range(NODES):
            environ = sandbox.env(
                KCOORD_LOCAL_DIR=str(sandbox.root / f"node{node}"),
                KCOORD_STORE=str(sandbox.root / "store"),
                KCOORD_REDIS_URL=url,
                KCOORD_LEASE_TTL=f"{ttl:g}",
                **more,
            )
            program = f"{sys.executable} {PROGRAMS / 'batch_rank.py'} {self.directory}"
            ranks = "; ".join(f'RANK={r} LOCAL_RANK={r} {program} {node}.{r} & pids="$pids $!"' for r in range(RANKS))
            script = f"{ranks}; for p in $pids; do wait $p || exit 1; done"
            command = [*KCOORD, "exec", "--", "bash", "-c", script]
            with self._logs[node].open("wb") as log, Path(os.devnull).open("rb") as nothing:
                streams = (nothing.fileno(), log.fileno(), log.fileno())
                self.nodes.append(
                    processes.start(command, environ, sandbox.root, streams, wrap=wrap[node] if wrap else ())
                )
            self._settings.append(Settings.from_environ(environ))

    # Batches.

    def begin(self, kernels: int = KERNELS, seconds: float = 0.1) -> int:
        """Give out a batch, and return its number."""
        number, self._batches = self._batches, self._batches + 1
        order = self.directory / f".batch-{number}"
        order.write_text(f"{kernels} {seconds}")
        order.rename(self.directory / f"batch-{number}")
        return number

    def until_compiling(self, number: int) -> None:
        self._until(lambda: self.begun(number), f"batch {number} is being compiled")

    def begun(self, number: int) -> list[Begun]:
        """The compiles of a batch that have begun, in order."""
        path = self.directory / f"begun-{number}"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        words = [line.split() for line in lines if line.endswith("\n")]  # the last one may be half written
        return [Begun(int(kernel), int(who.partition(".")[0]), float(when)) for kernel, who, when in words]

    def finished(self, number: int, nodes: tuple[int, ...] = tuple(range(NODES))) -> Batch:
        """Wait for every rank of `nodes`."""
        reports = [self.directory / f"report-{number}-{n}.{r}" for n in nodes for r in range(RANKS)]
        self._until(lambda: all(r.exists() for r in reports), f"every rank has batch {number}")
        read = [json.loads(r.read_text()) for r in reports]
        return Batch(dict(Counter(n for r in read for n in r["compiled"])), [r["served"] for r in read])

    def compile_together(self) -> None:
        """Two nodes that coordinate compile each kernel once, and who waits for another node is woken.

        A second batch tells a machine that stood still for a moment from news that do not come.
        """
        waits = []
        for _ in range(2):
            batch = self.finished(self.begin(seconds=0.02))
            assert batch.compiles == dict.fromkeys(range(KERNELS), 1), self.said()
            waits.append(batch.longest_wait_after(max(rank[0] for rank in batch.by_rank)))
            if waits[-1] < RECHECK:
                return
        raise AssertionError(f"nobody was woken: {waits}")

    def until_together(self, since: float) -> float:
        """Wait for a batch of which each kernel was compiled once; the seconds since `since`."""
        while self.finished(self.begin(seconds=0.02)).total > KERNELS:
            assert time.monotonic() < since + BACK_WITHIN, "they still compile the same kernels"
        return time.monotonic() - since

    # What the nodes say.

    def coordinator_of(self, node: int) -> str:
        return str(self.status(node)["coordinates"])

    def status(self, node: int) -> dict[str, Any]:
        with Wire(self._settings[node].socket_path) as wire:
            wire.hello()
            return wire.ask({"op": "status"})

    def until_back(self, since: float) -> float:
        """Wait until Redis coordinates both nodes; the seconds since `since`."""
        bound = since + BACK_WITHIN - time.monotonic()
        eventually(lambda: [self.coordinator_of(n) for n in range(NODES)] == ["Redis"] * NODES, bound, "back on Redis")
        return time.monotonic() - since

    def openings(self) -> list[int]:
        """How often each node's breaker has opened because of Redis."""
        return [self.status(n)["breaker"][0]["opened"] for n in range(NODES)]

    def log(self, node: int) -> str:
        return self._logs[node].read_text()

    @property
    def length_of_logs(self) -> list[int]:
        return [len(self.log(n)) for n in range(NODES)]

    def told_since(self, lengths: list[int], words: str) -> list[list[str]]:
        """For each node its lines with `words` in them since its log was that long."""
        logs = [self.log(n)[length:] for n, length in enumerate(lengths)]
        return [[line for line in log.splitlines() if words in line] for log in logs]

    # Beginning and end.

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self.directory / "end").touch()
        try:
            codes = [node.wait(60) for node in self.nodes]
            if kind is None:
                assert [c for n, c in enumerate(codes) if n not in self.lost] == [0] * (NODES - len(self.lost)), (
                    self.said()
                )
                if not self.lost:
                    assert not list((self.store.root / "v2" / "staging").iterdir()), "staging is left behind"
                for manifest in self.store.manifests():
                    assert self.store.fetch(manifest.key.digest) is not None, "what is published is valid"
        finally:
            for node in self.nodes:
                node.kill()
                node.wait()
            if kind is not None:
                print(self.said(), file=sys.stderr)

    def said(self) -> str:
        return "\n".join(f"--- node {n}\n{self.log(n)}" for n in range(NODES))

    def _until(self, condition: Any, what: str) -> None:
        def happened() -> object:
            ended = [node.poll() for n, node in enumerate(self.nodes) if n not in self.lost]
            if any(code not in (None, 0) for code in ended):
                pytest.fail(f"a node has ended: {ended}\n{self.said()}")
            return condition()

        eventually(happened, 60, what)
