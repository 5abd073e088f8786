"""Clusters up to 1,250 nodes with a modelled NFS server: a few whole nodes, and light ones beside them, under time dilation."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.earlier_job import PROFILE, announce, fill
from benchmarks.cluster.play import Kernels, LightNodes, Measured, bound, play
from benchmarks.cluster.processes import ClusterError
from benchmarks.cluster.table import orderly, recorded
from benchmarks.nfs_model import LATENCY, LEAST, RATE, NfsServer
from benchmarks.result import Result

COLD, IN_STEP, WARM, PACKED = "cold, profile", "cold, no profile", "warm, no pack", "warm, pack"
WAYS = (COLD, IN_STEP, WARM, PACKED)
COLUMNS = [
    "nodes", "keys", "way", "dilation", "wall s", "bound: compiles s", "bound: store s", "wall ÷ bound", "duplicates",
    "requests per key and node", "Redis CPU s", "commands per key and node", "connections of an agent", "Redis KiB of an agent",
    "READY → heard, median ms", "heard, 99 % ms", "publish → loaded, median ms", "loaded, 99 % ms", "an agent's CPU s",
    "an agent's MB", "machine's CPU %", "of it this run's",
]  # fmt: skip

_RANKS = 8  # of a whole node
_WALKERS = 2000  # ranks of all light nodes together, at most, or one of each
_IN_STEP_KEYS = 30  # in step the compiles come one after the other: a tenth of them tells as much
_FETCH, _SHARED = 8, 2  # requests for each key and node, alone and with packs; for estimates
_ABREAST = 8  # as in `kcoord.agent.store_breaker`
_LIMIT = 120.0  # seconds of a row, as it is planned
_GRACE = 300.0  # seconds that a row may take longer
_DILATION = 16.0  # at most
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Row:
    nodes: int
    keys: int
    way: str

    @property
    def name(self) -> str:
        return f"{self.nodes} nodes, {self.keys} keys, {self.way}"


def kernels_of(count: int) -> Kernels:
    """So many kernels: all that were recorded, every nth of them, or several variants of each; longest first."""
    kernels = recorded()
    if count <= len(kernels):
        return kernels[:: len(kernels) // count][:count]
    return [(f"{name} variant {n}", seconds) for name, seconds in kernels for n in range(count // len(kernels))]


def run(
    nodes: Sequence[int] = (),
    keys: Sequence[int] = (),
    ways: Sequence[str] = (),
    whole: int = 4,
    slower: float = _DILATION,
) -> Result:
    """Clusters of so many nodes, of which `whole` are whole, dilated by `slower` where a row has the time."""
    result = Result(
        f"A simulated cluster on a modelled NFS: {whole} whole nodes of {_RANKS} ranks, the others light", list(COLUMNS)
    )
    with orderly():
        for row in [
            Row(count, _IN_STEP_KEYS if way == IN_STEP else each, way)
            for each in sorted(set(keys)) or [300, 3000]
            for way in ways or WAYS
            for count in sorted(set(nodes)) or [10, 64, 256, 1250]
            if each <= 300 or way in (COLD, WARM) or (way == PACKED and count > 1000)
        ]:
            factor = _dilation(row, slower)
            if factor is None:
                result.notes.append(
                    f"{row.name}: left out, it would take more than {_LIMIT:.0f} s without any dilation"
                )
                continue
            try:
                found = _play(row, whole, factor)
            except ClusterError as error:
                print(f"{row.name}: {error}", file=sys.stderr, flush=True)
                result.notes.append(f"{row.name}: not measured: {str(error).partition(';')[0]}")
                continue
            result.rows.append(cells(row, found, factor))
            result.notes += _notes(row, found)
            print("| " + " | ".join(result.rows[-1]) + " |", file=sys.stderr, flush=True)
    result.notes += [
        "the modelled server: 0.5 ms a request, 60,000 requests a second for all; what counts as one: benchmarks/nfs_model.py",
        f"a whole node is a job's agent, {_RANKS} ranks, and a local tier; a light one has real leases at the one Redis, leads, "
        "publishes and waits, and makes an agent's requests to the server, without bytes and ranks' sockets: "
        "benchmarks/cluster/light.py",
        "dilation: compiles, server and kcoord's own waits take so many times as long, and all times but CPU are divided by it "
        "again, so this machine's cores count as so many times faster",
        "bound: compiles: an equal share for each rank or the longest kernel, in step their sum; store: the requests that the "
        "row made ÷ 60,000, or those of one node, 0.5 ms each, one after the other (with a profile: eight artifacts at a time); "
        "wall ÷ bound: by the greater; with a pack all is on the node when the ranks ask",
        f"requests per key and node: {LEAST} would be the least for one file each (OPEN, READ, CLOSE)",
        "READY → heard: from a light leader's READY in Redis until another light node has heard it, over all nodes and keys; "
        "publish → loaded: from the end of a compile until a rank of a whole node that waited for it has loaded it",
        "of a pack the requests are counted from the agents' start, and the wall from the ranks' first claim, as ranks import "
        "for seconds",
        "where the machine's CPU is near 100 %, the wall is the machine's; it had other work beside this",
        f"{_IN_STEP_KEYS} keys: every tenth of the recorded kernels; 3,000: ten variants of each",
        "the store is a directory in memory: the time of the server's disks is in the 0.5 ms",
    ]
    return result


def _light_ranks(row: Row) -> int:
    return max(1, min(_RANKS, _WALKERS // row.nodes))


def _dilation(row: Row, most: float) -> float | None:
    """The largest with which the row is expected to fit into its time; None if none is."""
    kernels = kernels_of(row.keys)
    work = {COLD: bound(kernels, row.nodes * _light_ranks(row)), IN_STEP: sum(seconds for _, seconds in kernels)}.get(
        row.way, 1.0
    )
    fetch = {IN_STEP: _FETCH, PACKED: 0}.get(row.way, _SHARED)
    store = row.nodes * row.keys * fetch / RATE
    return next((f for f in (16.0, 8.0, 4.0, 2.0, 1.0) if f <= most and (work + store) * f <= _LIMIT), None)


def _play(row: Row, whole: int, factor: float) -> Measured:
    count = min(whole, row.nodes)
    kernels = [(name, round(seconds * factor, 3)) for name, seconds in kernels_of(row.keys)]
    with tempfile.TemporaryDirectory(
        prefix="kcb-", dir=_MEMORY if _MEMORY.is_dir() else None, ignore_cleanup_errors=True
    ) as name:
        root = Path(name)
        server = NfsServer(root / "server", root / "store", factor)
        probed = fill(root / "store", [("probe", 1.0)], pack=False)
        fetch = server.of_fetch(root / "store", *next(iter(probed.items())))
        manifests = fill(root / "store", kernels, pack=row.way == PACKED) if row.way in (WARM, PACKED) else {}
        at_start = 0
        if row.way == PACKED:
            alone = play(root, 1, 1, kernels[:1], together=False, limit=_GRACE, slower=factor, server=server,
                         settings={"profile": PROFILE})  # fmt: skip
            at_start = alone.requests
            root = root / "all"  # its local directories are new
            root.mkdir()
            (root / "store").symlink_to(Path(name) / "store")
        light = LightNodes(row.nodes - count, _light_ranks(row), fetch, at_start)
        return play(
            root, count, _RANKS, kernels, together=row.way == COLD, limit=_LIMIT + _GRACE, light=light, slower=factor,
            server=server, settings=None if row.way == IN_STEP else {"profile": PROFILE},
            prepare=lambda url: announce(url, manifests),
        )  # fmt: skip


def cells(row: Row, m: Measured, factor: float) -> list[str]:
    wall = m.wall / factor
    abreast = _ABREAST if row.way == COLD else 1  # artifacts that a node fetches at a time
    store = max(m.requests / RATE, m.requests / m.nodes * LATENCY / abreast)
    compiles = sum(seconds for _, seconds in kernels_of(row.keys)) if row.way == IN_STEP else m.bound / factor
    if row.way in (WARM, PACKED):
        compiles = 0.0
    per = m.kernels * m.nodes
    return [
        f"{row.nodes:,}", f"{row.keys:,}", row.way, f"{factor:g}", f"{wall:.2f}", f"{compiles:.2f}", f"{store:.2f}",
        "" if row.way == PACKED else f"{wall / max(compiles, store):.2f}", str(m.compiles - len(m.compiled)),
        f"{m.requests / per:.2f}",
        f"{m.redis_cpu:.2f}",
        f"{m.commands / per:.3f}", f"{m.connections / m.nodes:.1f}", f"{m.memory / m.nodes / 1024:.1f}",
        *_milliseconds(m.heard, factor), *_milliseconds(m.told, factor), f"{m.agent_cpu:.2f}", f"{m.agent_memory / 1e6:.1f}",
        f"{m.machine:.0f}", f"{m.ours:.0f}",
    ]  # fmt: skip


def _milliseconds(ordered: list[float], factor: float) -> list[str]:
    return [f"{1000 * ordered[int(len(ordered) * q)] / factor:.0f}" if ordered else "" for q in (0.5, 0.99)]


def _notes(row: Row, m: Measured) -> list[str]:
    notes = []
    if m.alone:
        notes.append(f"{row.name}: {m.alone} compiles that nobody coordinated")
    short = [reached for reached in m.reached if reached < m.kernels]
    if short:
        notes.append(f"{row.name}: {len(short)} ranks ended without all kernels, one with {min(short)}")
    return notes + [f"{row.name}: a log says: {line}" for line in m.said[:3]]
