"""``python -m benchmarks.cluster.light``: light nodes of the simulated cluster, hundreds in a process.

A light node asks, waits, leads and announces through leases of its own at the one Redis, compiles (sleeps), and publishes into
the store as an agent does. It fetches in requests to the NFS server alone: so many as an agent's fetch makes, eight artifacts at
a time, or as an agent's read of a pack, without bytes, disk and ranks' sockets. It writes no pack. So a machine of few cores has
room for a cluster's load on Redis and the store, beside a few whole nodes, whose agents and ranks are a job's.

Reads a `Light` as one line of JSON, and speaks as `benchmarks.cluster.node` does.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import hashlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.cluster.dilation import dilate
from benchmarks.cluster.node import content_of, key_of
from benchmarks.lease_herd import Kernel, Node, connect_all, order
from benchmarks.nfs_model import Client
from kcoord.artifacts.manifest import FileEntry, Manifest, Origin
from kcoord.artifacts.store import Store
from kcoord.leases.redis import RedisLeases
from kcoord.settings import Settings

T = TypeVar("T")

_ABREAST = 8  # as in `kcoord.agent.store_breaker`
_THREADS = 64  # of this process' leaders, at the store
_PATIENCE = 10.0  # Redis answers soon; hundreds of nodes in one process see it late
_LAST = 0.5  # seconds for the last news


@dataclass(frozen=True)
class Light:
    """The light nodes `numbers`, of `ranks` each, which have the ranks from `first` on, in order, of `world`.

    `fetch`: requests for one artifact; `requests`: of a node whose pack has all of them, else 0. The rest as in
    `benchmarks.cluster.node.Part`.
    """

    numbers: list[int]
    first: int
    ranks: int
    world: int
    together: bool
    settings: dict[str, str]
    kernels: list[tuple[str, float]]
    dilation: float
    fetch: int
    requests: int


class _Light(Node):
    """`at_store` runs a function in a thread."""

    store: Store
    client: Client
    at_store: Callable[[Callable[[], Any]], Any]
    requests: int
    _turns: asyncio.Semaphore
    compiled: Counter[str]
    finished: dict[str, float]  # kernel → end of its compile

    def key(self, kernel: Kernel) -> str:
        return _digest(kernel.name, kernel.seconds)

    async def compile(self, kernel: Kernel) -> str:
        found = await self.at_store(functools.partial(self.store.fetch, self.key(kernel)))
        if found is not None:
            return str(found[2])
        await asyncio.sleep(kernel.seconds)
        self.compiled[kernel.name] += 1
        self.finished[kernel.name] = time.monotonic()
        return str(await self.at_store(functools.partial(publish, self.store, kernel.name, kernel.seconds)))

    async def load(self, kernel: Kernel) -> None:
        async with self._turns:
            await self.client.make(self.requests)


@functools.cache
def _digest(name: str, seconds: float) -> str:
    return key_of(name, seconds).digest


def publish(store: Store, name: str, seconds: float) -> str:
    """Publish the artifact that a rank would have compiled; returns the SHA-256 of its manifest."""
    content = content_of(name)
    entry = FileEntry("kernel.cubin", len(content), hashlib.sha256(content).hexdigest())
    return store.publish(
        Manifest(key_of(name, seconds), (entry,), seconds, Origin("light", 1, 0)), {entry.name: content}
    )


async def _play(part: Light) -> dict[str, Any]:
    settings = Settings.from_environ({}, **part.settings)
    assert settings.redis_url is not None
    assert settings.store is not None
    times = {"ttl": settings.lease_ttl, "limit": settings.lease_limit, "failure_ttl": settings.failure_ttl}
    store, client, threads = Store(settings.store), Client(), ThreadPoolExecutor(_THREADS)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(threads, store.open)
    nodes = []
    for number in part.numbers:
        leases = RedisLeases(settings.redis_url, settings.namespace, **times)
        node = _Light(leases, number, settings.lease_ttl, 2.0 * part.dilation)
        node.store, node.client, node.requests = store, client, part.fetch
        node.at_store = functools.partial(loop.run_in_executor, threads)
        node._turns, node.compiled, node.finished = asyncio.Semaphore(_ABREAST), Counter(), {}
        nodes.append(node)
    await connect_all(nodes)
    for node in nodes:
        node.listen()
    kernels = [Kernel(*kernel) for kernel in part.kernels]
    walks: list[tuple[_Light, Sequence[Kernel]]] = []
    for place, node in enumerate(nodes):
        for n in range(part.ranks):
            rank = part.first + place * part.ranks + n
            walks.append((node, order(kernels, rank, part.world) if part.together else kernels))
    gc.freeze()
    _say({"light": len(nodes)})
    begin = await asyncio.to_thread(sys.stdin.readline)
    threading.Thread(target=_end_with_input, daemon=True).start()
    if not begin:
        return {}
    await asyncio.sleep(float(begin) - time.monotonic())
    cpu = time.process_time()

    async def walk(node: _Light, each: Sequence[Kernel]) -> None:
        if part.together:
            await node.walk(each)
        else:
            for kernel in each:
                await node.claim(kernel, True)

    if part.requests:  # a node that has a pack asks for no key
        await asyncio.gather(*(client.make(part.requests) for _ in nodes))
    else:
        await asyncio.gather(*(walk(node, each) for node, each in walks))
    finished = time.monotonic()
    cpu = time.process_time() - cpu
    await asyncio.sleep(_LAST)
    announced = {key: moment for node in nodes for key, moment in node.published.items()}
    heard: dict[str, list[float]] = {}
    for node in nodes:
        for key, moment in node.told.items():
            if key not in node.published:
                heard.setdefault(key, []).append(round(moment, 4))
    return {
        "finished": finished,
        "compiled": dict(sum((node.compiled for node in nodes), Counter())),
        "published": {name: moment for node in nodes for name, moment in node.finished.items()},
        "announced": announced,
        "heard": heard,
        "cpu": cpu,
    }


async def _main() -> None:
    part = Light(**json.loads(sys.stdin.readline()))
    dilate(part.dilation, _PATIENCE)
    _say(await _play(part))
    await asyncio.Event().wait()  # the connections stay until all have been counted


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_main())
