"""Leases of a whole cluster at one Redis: real `RedisLeases`, hundreds in a process, without agents, store and disks.

Every node walks the recorded kernels as `kcoord.warmup` does, each rank in its own order; a compile is a sleep. A node asks for a
key as an agent does: once for all its ranks, and for one that another node compiles once in two seconds unless a rank waits.
``python -m benchmarks.lease_herd`` is one process of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from benchmarks.cluster.dilation import dilate
from benchmarks.cluster.play import Kernels, cpu_seconds_of, spent_commands
from benchmarks.cluster.processes import Load
from benchmarks.cluster.table import recorded
from benchmarks.result import Result
from kcoord.agent.upcoming import dealt
from kcoord.leases.base import Lease, Ready, Wait, await_turn, probe
from kcoord.leases.redis import RedisLeases
from tests.support.redis_server import RedisServer

_TTL, _LIMIT, _FAILURE_TTL = 15.0, 900.0, 30.0
_CLAIM = 0.003  # seconds
_AT_ONCE = 50  # agents of a process that connect
_FILES = 65536
_LIMIT_OF_RUN = 300.0  # seconds


@dataclass(frozen=True)
class Kernel:
    name: str
    seconds: float


def order(kernels: Sequence[Kernel], rank: int, world: int) -> list[Kernel]:
    """As a node's agent deals them out: the rank's own share first, then those of the ranks after it."""
    shares = dealt(kernels, world)
    return [kernel for share in shares[rank:] + shares[:rank] for kernel in share]


@dataclass
class Node:
    """One node's leases, and which keys it has, or is asking for.

    `busy_for`: as in `kcoord.agent.acquisition`; `pace`: seconds that a rank takes for a key at least.
    """

    service: RedisLeases
    number: int
    ttl: float = _TTL
    busy_for: float = 2.0  # seconds
    pace: float = _CLAIM
    have: set[str] = field(default_factory=set)
    asking: dict[str, asyncio.Task[bool]] = field(default_factory=dict)
    loading: set[str] = field(default_factory=set)
    elsewhere: dict[str, float] = field(default_factory=dict)
    published: dict[str, float] = field(default_factory=dict)  # key → moment at which this node said that it is ready
    told: dict[str, float] = field(default_factory=dict)  # key → moment at which this node knew it of another
    compiles: int = 0

    async def walk(self, kernels: Sequence[Kernel]) -> None:
        busy = [kernel for kernel in kernels if not await self.claim(kernel, False)]
        for kernel in busy:
            await self.claim(kernel, True)

    async def claim(self, kernel: Kernel, waits: bool) -> bool:
        """False: somebody else compiles it, and this rank does not wait."""
        await asyncio.sleep(self.pace)
        name = self.key(kernel)
        while name not in self.have:
            under_way = self.asking.get(name)
            compiles = under_way is not None and name not in self.loading
            if not waits and (compiles or time.monotonic() < self.elsewhere.get(name, 0.0)):
                return False
            if under_way is None:
                under_way = self.asking[name] = asyncio.create_task(self._flight(kernel, waits))
            if not await asyncio.shield(under_way) and not waits:
                return False
        return True

    async def _flight(self, kernel: Kernel, waits: bool) -> bool:
        name = self.key(kernel)

        def stays(wait: Wait) -> bool:
            self.elsewhere[name] = time.monotonic() + min(self.busy_for, wait.ttl)
            return waits

        try:
            token = f"{self.number}.{kernel.name}"
            answer = await await_turn(self.service, name, token, f"node-{self.number}", stays=stays)
            if isinstance(answer, Lease):
                answer.keep_alive(self.ttl)
                await answer.ready(await self.compile(kernel))
                self.published[name] = time.monotonic()
            elif isinstance(answer, Ready):
                self.loading.add(name)
                await self.load(kernel)
            if isinstance(answer, (Lease, Ready)):
                self.have.add(name)
            return answer is not None
        finally:
            del self.asking[name]

    def key(self, kernel: Kernel) -> str:
        return kernel.name

    async def compile(self, kernel: Kernel) -> str:
        """Bring the kernel into the store, and return its manifest's SHA-256."""
        await asyncio.sleep(kernel.seconds)
        self.compiles += 1
        return "5" * 64

    async def load(self, kernel: Kernel) -> None:
        """Bring the kernel from the store to this node."""

    def listen(self) -> None:
        """Note when news says that a key is ready, whether or not a rank waits for it."""
        wake = self.service._wake

        def noting(key: str) -> None:
            if key in self.service._ready:
                self.told.setdefault(key, time.monotonic())
            wake(key)

        self.service._wake = noting  # type: ignore[method-assign]


async def connect_all(nodes: Sequence[Node]) -> None:
    """Connect the nodes' leases, few at a time: this process is slower than their time-outs."""
    for first in range(0, len(nodes), _AT_ONCE):
        await asyncio.gather(*(probe(node.service) for node in nodes[first : first + _AT_ONCE]))


def run(nodes: list[int], ranks: int = 1, slower: float = 1.0) -> Result:
    """Herds of so many `nodes`, of `ranks` each. `slower`: see `benchmarks.cluster.dilation`."""
    kernels = recorded()
    result = Result(
        f"The leases of a herd: {len(kernels)} kernels, {ranks} rank{'s' * (ranks > 1)} of each node",
        [
            "nodes", "wall s", "compiles", "Redis commands per key and node", "script calls per key and node", "Redis CPU s",
            "connections of an agent", "Redis KiB of an agent", "published → told, median ms", "99 % ms", "machine's CPU %",
        ],
        notes=[
            "real `RedisLeases` in few processes, without agents and store: the walk of `kcoord.warmup`, compiles are sleeps",
            "published → told: from the leader's READY in Redis until another node has heard it, over all nodes and keys",
            "the agents connect and follow before the clock starts; Redis CPU and commands are of the walk alone",
            "on few cores the agents' processes are slower than Redis: then the wall and what is told late are the machine's",
        ],
    )  # fmt: skip
    if slower != 1:
        result.notes.append(
            f"dilation {slower:g}: compiles and kcoord's own waits take so many times as long, and wall and published → told are "
            "divided by it again, so this machine's cores count as so many times faster: benchmarks/cluster/dilation.py"
        )
    for count in sorted(nodes) or [8, 128]:
        result.rows.append(_herd(count, ranks, kernels, slower))
        print(result.rows[-1], file=sys.stderr, flush=True)
    return result


def _herd(nodes: int, ranks: int, usual: Kernels, slower: float) -> list[str]:
    _allow_files()
    kernels = [(name, seconds * slower) for name, seconds in usual]
    processes = max(1, min(nodes, len(os.sched_getaffinity(0))))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RedisServer(tcp=True, options=["--maxclients", str(_FILES // 2)]))
        client = stack.enter_context(contextlib.closing(redis.Redis.from_url(server.url, protocol=2)))
        memory = int(client.info("memory")["used_memory"])
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.lease_herd"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(processes)
        ]
        stack.callback(lambda: [child.kill() or child.wait() for child in children])
        for n, child in enumerate(children):
            part = {"url": server.url, "nodes": nodes, "ranks": ranks, "mine": list(range(n, nodes, processes))}
            _tell(child, {**part, "kernels": kernels, "slower": slower})
        for child in children:
            _hear(child)
        time.sleep(3.0)  # the server shrinks buffers of idle clients
        clients = int(client.info("clients")["connected_clients"]) - 1
        memory = int(client.info("memory")["used_memory"]) - memory
        before, cpu, begun = spent_commands(client), cpu_seconds_of(server.pid), time.monotonic() + 0.5
        for child in children:
            _tell(child, begun)
        with Load(begun) as load:
            found = [_hear(child) for child in children]
        wall, cpu = time.monotonic() - begun, cpu_seconds_of(server.pid) - cpu
        after = spent_commands(client)
    calls = {name: count - before.get(name, (0, 0))[0] for name, (count, _) in after.items()}
    sent = sum(calls.get(name, 0) for name in ("evalsha", "eval", "subscribe", "hgetall"))
    published = {key: moment for each in found for key, moment in each["published"].items()}
    late = sorted(
        1000 / slower * (moment - published[key])
        for each in found
        for told in each["told"]
        for key, moment in told.items()
    )
    per = len(kernels) * nodes
    return [
        str(nodes), f"{wall / slower:.1f}", str(sum(each["compiles"] for each in found)), f"{sent / per:.3f}",
        f"{(calls.get('evalsha', 0) + calls.get('eval', 0)) / per:.3f}", f"{cpu:.2f}", f"{clients / nodes:.1f}",
        f"{memory / nodes / 1024:.1f}", *(f"{late[int(len(late) * q)]:.1f}" if late else "" for q in (0.5, 0.99)),
        f"{load.mean:.0f}",
    ]  # fmt: skip


def _tell(child: subprocess.Popen[str], what: Any) -> None:
    assert child.stdin is not None
    child.stdin.write(json.dumps(what) + "\n")
    child.stdin.flush()


def _hear(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    return json.loads(child.stdout.readline())


def _allow_files() -> None:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, _FILES if most < 0 else min(most, _FILES)), most))


async def _main() -> None:
    part = json.loads(sys.stdin.readline())
    slower = float(part["slower"])
    if slower != 1:
        dilate(slower)
    times = {"ttl": _TTL * slower, "limit": _LIMIT * slower, "failure_ttl": _FAILURE_TTL * slower}
    url, patient = part["url"], {"distance": 60.0 * slower, "silence": 60.0 * slower}
    nodes = [
        Node(RedisLeases(url, "herd", **times, **patient), number, _TTL * slower, 2.0 * slower, _CLAIM * slower)
        for number in part["mine"]
    ]
    await connect_all(nodes)
    for node in nodes:
        node.listen()
    kernels = [Kernel(*kernel) for kernel in part["kernels"]]
    world = part["nodes"] * part["ranks"]
    orders = [order(kernels, rank, world) for node in nodes for rank in _ranks(node.number, part["ranks"])]
    gc.freeze()
    print(json.dumps("ready"), flush=True)
    begin = json.loads(await asyncio.to_thread(sys.stdin.readline))
    await asyncio.sleep(begin - time.monotonic())
    owners = [node for node in nodes for _ in range(part["ranks"])]
    walks = asyncio.gather(*(node.walk(each) for node, each in zip(owners, orders, strict=True)))
    await asyncio.wait_for(walks, _LIMIT_OF_RUN)
    await asyncio.sleep(0.5 * slower)  # the last news
    found = {
        "compiles": sum(node.compiles for node in nodes),
        "published": {key: moment for node in nodes for key, moment in node.published.items()},
        "told": [{k: t for k, t in node.told.items() if k not in node.published} for node in nodes],
    }
    print(json.dumps(found), flush=True)
    await asyncio.gather(*(node.service.close() for node in nodes))


def _ranks(number: int, ranks: int) -> range:
    return range(number * ranks, (number + 1) * ranks)


if __name__ == "__main__":
    _allow_files()
    asyncio.run(_main())
