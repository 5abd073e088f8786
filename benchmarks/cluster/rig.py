"""Whole nodes on the client hosts of a rig with a real NFS server (tests/nfs/README.md): the RPCs that their kernels send, beside
the requests that the model counts in the same run on this machine.

``python -m benchmarks.cluster.rig NODES WAY KEYS MOUNT`` is one run, on the server's host; it prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cluster.dilation import dilate
from benchmarks.cluster.earlier_job import PROFILE, announce, fill
from benchmarks.cluster.play import Measured, Server, play
from benchmarks.cluster.processes import ClusterError
from benchmarks.cluster.scale import COLD, IN_STEP, PACKED, WARM, WAYS, kernels_of
from benchmarks.cluster.table import orderly
from benchmarks.nfs_model import NfsServer
from benchmarks.result import Result
from kcoord.packs.pack_files import packs_of
from tests.nfs.rig import PROJECT, PYTHON, Rig
from tests.support.mountstats import sent

HOSTS = "ABCDEFGH"
_RANKS = 1  # of a node
_KEYS, _IN_STEP_KEYS = 300, 30
_FEW = 40  # keys of more than three nodes: an emulated rig has few cores
_SLOWER, _MODEL_SLOWER = 16.0, 4.0  # kcoord's waits: a rig may be emulated
_COMPILES = 0.25  # of the recorded seconds
_PATIENCE = 10.0  # an earlier job's hundreds of answers come at once
_LIMIT = 600.0  # seconds of a run
_ADDRESS = "10.9.0.1"  # of the server's host
_EXPORT, _MOUNT = Path("/srv/nfs"), "/mnt/v4"
_NOT_OURS = ("SEQUENCE", "RENEW", "NULL")  # sent for the mount
_SHOWN = 10  # kinds of RPC


class _Rig:
    """The server of the export, as `benchmarks.cluster.play.Server`. On the server's host."""

    environ: dict[str, str] = {}  # noqa: RUF012 - the hosts have it mounted

    def __init__(self, hosts: str, mount: str) -> None:
        self._hosts, self._mount = hosts, mount
        self._counts: list[Counter[str]] = []

    @property
    def requests(self) -> int:
        count: Counter[str] = Counter()
        for host in self._hosts:
            stats = subprocess.run(
                ["on", host, "cat", "/proc/self/mountstats"], check=True, capture_output=True, text=True
            )
            count.update(sent(stats.stdout, self._mount))
        self._counts.append(Counter({op: n for op, n in count.items() if op not in _NOT_OURS}))
        return self._counts[-1].total()

    @property
    def last(self) -> dict[str, int]:
        """The requests between the last two looks, by operation, the most first."""
        return dict((self._counts[-1] - self._counts[-2]).most_common())


def _keys(nodes: int, way: str) -> int:
    return _IN_STEP_KEYS if way == IN_STEP else _FEW if nodes > 3 else _KEYS


def _run(
    root: Path, nodes: int, way: str, keys: int, server: Server, store: Path, slower: float, **where: Any
) -> Measured:
    """A run whose store is at `store` on this machine."""
    kernels = [(name, round(seconds * _COMPILES, 3)) for name, seconds in kernels_of(keys)]
    manifests = fill(store, kernels, pack=way == PACKED) if way in (WARM, PACKED) else {}
    settings = where.pop("settings", {}) | ({} if way == IN_STEP else {"profile": PROFILE})
    return play(
        root, nodes, _RANKS, kernels, together=way == COLD, limit=_LIMIT, slower=slower, server=server, settings=settings,
        prepare=lambda url: announce(url, manifests), **where,
    )  # fmt: skip


def _on_rig(nodes: int, way: str, keys: int, mount: str) -> dict[str, Any]:
    server = _Rig(HOSTS[:nodes], mount)
    with tempfile.TemporaryDirectory(prefix="kcb-", dir="/var/tmp", ignore_cleanup_errors=True) as name:
        root, store = Path(name), _EXPORT / Path(name).name
        store.mkdir()
        try:
            found = _run(
                root, nodes, way, keys, server, store, _SLOWER, address=_ADDRESS, wraps=[("on", host) for host in HOSTS[:nodes]],
                settings={"store": f"{mount}/{store.name}", "agent_timeout": "300"},
            )  # fmt: skip
            packs = [path.stat().st_size for path in packs_of(store, PROFILE)]
        finally:
            shutil.rmtree(store)
    return {
        "requests": found.requests, "ops": server.last, "compiles": found.compiles, "alone": found.alone, "wall": found.wall,
        "keys": found.kernels, "packs": packs, "said": found.said[:3],
    }  # fmt: skip


def _modelled(nodes: int, way: str, keys: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as name:
        root = Path(name)
        server = NfsServer(root / "server", root / "store", _MODEL_SLOWER)
        return _run(root, nodes, way, keys, server, root / "store", _MODEL_SLOWER)


def run(nodes: Sequence[int] = (), keys: Sequence[int] = (), ways: Sequence[str] = ()) -> Result:
    """The ways on so many client hosts, of as many keys, on the rig that ``NFS_RIG`` and ``RIG_SHARE`` name."""
    command, share = os.environ.get("NFS_RIG"), os.environ.get("RIG_SHARE")
    if not command or not share:
        raise SystemExit("benchmark cluster_nfs-rig: NFS_RIG and RIG_SHARE name no rig: see tests/nfs/README.md")
    rig = Rig(command, Path(share))
    rig.install()
    sizes = sorted(set(nodes)) or [1, 3, 8]
    rig.run(f"sh {PROJECT}/tests/nfs/guest/more_hosts.sh {' '.join(HOSTS[3 : max(sizes)])}", _LIMIT)
    for host in HOSTS[: max(sizes)]:
        rig.on(host, f"mountpoint -q {_MOUNT}")  # else a node has a store of its own
    result = Result(
        "Nodes of one rank on the client hosts of a real NFS server",
        [
            "nodes", "keys", "way", "RPCs of a node", "the model's requests", "RPCs per key and node", "the model's",
            "compiles", "wall s", "RPCs, all nodes",
        ],
    )  # fmt: skip
    rows = [(way, count, each) for way in ways or WAYS for count in sizes for each in keys or [_keys(count, way)]]
    with orderly():
        for way, count, each in rows:
            where = shlex.join([str(count), way, str(each), _MOUNT])
            line = f"cd {PROJECT} && PYTHONPATH={PROJECT} {PYTHON} -m benchmarks.cluster.rig {where}"
            try:
                found, model = json.loads(rig.run(line, 2 * _LIMIT)), _modelled(count, way, each)
            except (AssertionError, ClusterError) as error:
                print(f"{count} nodes, {way}: {error}", file=sys.stderr, flush=True)
                result.notes.append(f"{count} nodes, {way}: not measured")
                continue
            result.rows.append(_cells(count, way, found, model))
            print("| " + " | ".join(result.rows[-1]) + " |", file=sys.stderr, flush=True)
            result.notes += _notes(f"{count} nodes, {way}", found)
    kernel, cores = rig.run("uname -r; nproc").split()
    result.notes += [
        f"the rig: a kernel NFS server and {max(sizes)} client hosts (namespaces, default mounts, NFS v4.1) in one emulated "
        f"machine, Linux {kernel}, {cores} virtual cores: its seconds are not those of a server",
        f"mounted with {rig.on('A', 'grep -o rsize=[0-9]* /proc/mounts | tail -1').strip()}",
        "RPCs: of all hosts' /proc/self/mountstats, from the agents' start (without a profile: from the ranks' first claim) "
        "until every rank has every kernel",
        "the model's: the same run on this machine with benchmarks/nfs_model.py",
        f"kcoord's waits take {_SLOWER:g} times as long on the rig, {_MODEL_SLOWER:g} times in the model; a compile takes "
        f"{_COMPILES:g} of the recorded seconds",
    ]
    return result


def _cells(nodes: int, way: str, found: dict[str, Any], model: Measured) -> list[str]:
    per = found["keys"] * nodes
    kinds = list(found["ops"].items())
    shown = ", ".join(f"{op} {count:,}" for op, count in kinds[:_SHOWN])
    return [
        str(nodes), str(found["keys"]), way, f"{found['requests'] / nodes:,.0f}", f"{model.requests / nodes:,.0f}",
        f"{found['requests'] / per:.2f}", f"{model.requests / per:.2f}", str(found["compiles"]), f"{found['wall']:.0f}", shown,
    ]  # fmt: skip


def _notes(name: str, found: dict[str, Any]) -> list[str]:
    notes = [f"{name}: a log says: {line}" for line in found["said"]]
    if found["packs"]:
        notes.append(f"{name}: a pack of {found['packs'][0] / 1e6:.1f} MB at the end")
    if found["alone"]:
        notes.append(f"{name}: {found['alone']} compiles that nobody coordinated")
    return notes


if __name__ == "__main__":
    dilate(_SLOWER, _PATIENCE)
    print(json.dumps(_on_rig(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])))
