"""Clusters of several sizes, with a profile and without, against the bound of every schedule."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from benchmarks.cluster.play import Kernels, Measured, bound, play
from benchmarks.cluster.processes import ClusterError
from benchmarks.cluster.profile import RECORDED
from benchmarks.result import Result

RANKS = 8  # of a node
PROFILE, IN_STEP, STOCK = "profile", "no profile, in step", "stock (arithmetic)"
_LIMIT = 460.0  # seconds for everything
_FILES = 65536  # open files of this process and of redis-server


def recorded() -> Kernels:
    """300 real kernels, see `benchmarks.cluster.profile`."""
    return [(str(name), float(seconds)) for name, seconds in json.loads(RECORDED.read_text())["kernels"]]


def run(nodes: Sequence[int] = (), in_a_process: int = 1, limit: float = _LIMIT) -> Result:
    """Clusters of so many nodes each, of which `in_a_process` share their processes.

    Runs that do not fit into `limit` seconds are left out, with a note.
    """
    sizes = sorted(set(nodes)) or [1, 8]
    kernels, end = recorded(), time.monotonic() + limit
    total = sum(seconds for _, seconds in kernels)
    result = Result(
        f"A simulated cluster: {len(kernels)} kernels, {total:.1f} s of compiling, the longest {kernels[0][1]:.2f} s",
        [
            "nodes", "ranks", "way", "wall s", "bound s", "wall ÷ bound", "compiles", "duplicates",
            "Redis commands per key and node", "an agent's CPU s", "Redis CPU s",
            "Redis connections of an agent", "Redis KiB of an agent",
            "publish → told, median ms", "99 % ms", "machine's CPU %",
        ],
    )  # fmt: skip
    in_step = next((n for n in sizes if n > 1), sizes[0])
    with orderly():
        for count, way in [*((n, PROFILE) for n in sizes), (in_step, IN_STEP)]:
            left, expected = end - time.monotonic(), bound(kernels, count * RANKS) if way == PROFILE else total
            name = f"{count} × {RANKS} ranks, {way}"
            if left < 1.2 * expected + 5:
                result.notes.append(f"{name}: left out, it would take more than the {left:.0f} s that are left")
                continue
            with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as directory:
                try:
                    found = play(Path(directory), count, RANKS, kernels, together=way == PROFILE, limit=left,
                                 in_a_process=in_a_process)  # fmt: skip
                except ClusterError as error:
                    print(result.text(), file=sys.stderr)
                    raise SystemExit(f"benchmark cluster: {name}: {error}") from None
            result.rows.append(_row(found, way))
            result.notes += _notes(found, name)
            print(f"{name}: {found.wall:.2f} s", file=sys.stderr, flush=True)
    if in_a_process > 1:
        result.notes.append(
            f"the agents of {in_a_process} nodes share a process, and so do their ranks: so this machine has room for them"
        )
    result.rows += [_stock(kernels, count * RANKS) for count in sizes]
    result.notes += [
        "everything is what a job runs, but the compiler, which sleeps; all nodes are processes of this one machine",
        "publish → told: from the end of a publish to a rank that waited for it and has loaded the artifact; on a machine "
        "without idle CPU most of it is the machine's",
        "bound: an equal share of the work or the longest kernel, whichever is more; no schedule is faster",
        f"{PROFILE}: the walk of `kcoord.warmup`; {IN_STEP}: every rank asks for the kernels in the same order",
        f"{STOCK}: every rank compiles everything, one after the other; computed, not run",
        f"the kernels: {json.loads(RECORDED.read_text())['what']}",
    ]
    return result


def _row(m: Measured, way: str) -> list[str]:
    return [
        str(m.nodes), str(m.ranks), way, f"{m.wall:.2f}", f"{m.bound:.2f}", f"{m.wall / m.bound:.2f}",
        str(m.compiles), str(m.compiles - len(m.compiled)), f"{m.commands / m.kernels / m.nodes:.2f}",
        f"{m.agent_cpu:.2f}", f"{m.redis_cpu:.2f}", f"{m.connections / m.nodes:.1f}", f"{m.memory / m.nodes / 1024:.1f}",
        *(f"{1000 * m.told[int(len(m.told) * share)]:.0f}" if m.told else "" for share in (0.5, 0.99)), f"{m.machine:.0f}",
    ]  # fmt: skip


def _stock(kernels: Kernels, ranks: int) -> list[str]:
    wall, least = sum(seconds for _, seconds in kernels), bound(kernels, ranks)
    compiles = ranks * len(kernels)
    return [
        str(ranks // RANKS), str(ranks), STOCK, f"{wall:.2f}", f"{least:.2f}", f"{wall / least:.2f}", str(compiles),
        str(compiles - len(kernels)), "", "", "", "", "", "", "", "",
    ]  # fmt: skip


def _notes(m: Measured, name: str) -> list[str]:
    most = sorted(m.redis.items(), key=lambda entry: -entry[1][1])[:4]
    shown = ", ".join(f"{command} {calls} × {spent / calls:.1f} µs" for command, (calls, spent) in most)
    notes = [f"{name}: in Redis {shown}"]
    if m.saturated > 0.1:
        notes.append(
            f"{name}: **the machine had no CPU left in {m.saturated:.0%} of the time**: "
            "what the wall is above the bound may be the machine's, and not the design's"
        )
    if m.alone:
        notes.append(f"{name}: {m.alone} compiles that nobody coordinated")
    short = [reached for reached in m.reached if reached < m.kernels]
    if short:
        notes.append(f"{name}: {len(short)} ranks ended without all kernels, one with {min(short)}")
    return notes + [f"{name}: a log says: {line}" for line in m.said[:3]]


@contextlib.contextmanager
def orderly() -> Iterator[None]:
    """SIGTERM ends the block as an exception does, so that no process is left; thousands of connections may be open."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit("benchmark cluster: terminated")

    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, _FILES if most < 0 else min(most, _FILES)), most))
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
