"""A node that starts warm: its look-ups in the store, one by one and with the profile's pack.

One rank claims 300 kernels of an earlier job, one after the other, on a node that has none of them. The store is on the modelled
NFS server (`benchmarks.nfs_model`), which counts the agent's requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import tempfile
import time
from pathlib import Path

from benchmarks.nfs_model import NfsServer
from benchmarks.result import Result
from kcoord.artifacts.manifest import FileEntry, Manifest, Origin
from kcoord.artifacts.store import Store
from kcoord.packs.index import Use
from kcoord.packs.recipe import today
from kcoord.packs.recipe_files import save_part
from kcoord.packs.writing import write_pack
from kcoord.rank.client import Ready
from tests.support.agents import Node, end_agent, key_of, recipe_of
from tests.support.cluster import start_agent
from tests.support.redis_server import RedisServer

_KERNELS = 300
_IMPORTS = 2.0  # seconds; ranks import torch before they ask


def run() -> Result:
    result = Result(
        f"A warm start of a node: {_KERNELS} kernels from the store",
        ["", "requests to the store until the last kernel", "until the agent has ended"],
        notes=[
            "kernels of 7 files, 66 KB, in the store 15 KB; one rank asks for one after the other, 2 s after the agent's start",
            "requests, of 0.5 ms each: those of an NFS v4.1 client without delegations, counted by benchmarks/nfs_model.py",
            "no kernel is on the node; the profile is that of an earlier job",
            "another agent has swept the store's staging lately; the one that does makes some 18 requests more",
        ],
    )
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as directory, RedisServer() as redis:
        store, names = _filled(Path(directory) / "store")
        cases: dict[str, dict[str, str]] = {
            "one by one, leases in files": {},
            "one by one, leases in Redis": {"redis_url": redis.url},
            "a pack": {"redis_url": redis.url},
        }
        for name, flags in cases.items():
            packed = name == "a pack"
            if packed:
                digests = [key_of(each).digest for each in names]
                write_pack(store, "job", [Use(each, f"triton/{each[:52]}", today()) for each in digests])
            requests = _start(store, names, Path(directory) / "server", packed, flags)
            result.rows.append([name, *(f"{count:,}" for count in requests)])
    return result


def _filled(root: Path) -> tuple[Store, list[str]]:
    """A store with the artifacts and the profile of an earlier job, and no pack."""
    store, names = Store(root), [f"k{n}" for n in range(_KERNELS)]
    store.open()
    for name in names:
        contents = _kernel(name)
        entries = [FileEntry(file, len(text), hashlib.sha256(text).hexdigest()) for file, text in contents.items()]
        key = key_of(name)
        store.publish(Manifest(key, tuple(sorted(entries, key=lambda e: e.name)), 1.0, Origin("node", 1, 0)), contents)
    save_part(root / "v2" / "profiles" / "job", [recipe_of(name) for name in names])
    (root / "v2" / "swept").touch()
    return store, names


def _kernel(name: str) -> dict[str, bytes]:
    """Files about as large, and as compressible, as those of a small Triton kernel."""
    chance = random.Random(name)
    text = " ".join(chance.choices([f"%{n}" for n in range(300)], k=2000)).encode()
    return {f"k.{kind}": text for kind in ("json", "ttir", "ttgir", "llir", "ptx", "source")} | {
        "k.cubin": chance.randbytes(10_000)
    }


def _start(store: Store, names: list[str], place: Path, packed: bool, flags: dict[str, str]) -> tuple[int, int]:
    """Requests until the last kernel, and until the agent's end."""
    server = NfsServer(place, store.root)
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(Node(store=str(store.root), profile="job", **flags))
        # the benchmark's own packs are the only ones
        agent = start_agent(node, "import kcoord.agent.chores.packing as p\np.FEWEST = 10 ** 9\n", server.environ)
        client = node.client()
        time.sleep(_IMPORTS)
        for name in names:
            key = key_of(name)
            answer = client.claim(key, node.directory / "triton" / key.digest[:52])
            assert answer == Ready("pack" if packed else "store"), answer
        until_last = server.requests
        end_agent(agent.pid)
        return until_last, server.requests
