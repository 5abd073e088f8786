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
from dataclasses import dataclass, field
from typing import Any

import redis

from benchmarks.cluster.play import Kernels, cpu_seconds_of, spent_commands
from benchmarks.cluster.table import recorded
from benchmarks.result import Result
from kcoord.leases.base import Lease, Ready, Wait, await_turn
from kcoord.leases.redis import RedisLeases
from kcoord.profiles.order import order
from tests.support.redis_server import RedisServer

_TTL, _LIMIT, _FAILURE_TTL = 15.0, 900.0, 30.0
_BUSY_FOR = 2.0  # seconds, as in `kcoord.agent.lease_tasks`
_CLAIM = 0.003  # seconds that a rank takes for a key at least
_AT_ONCE = 50  # agents of a process that connect; this process is slower than their time-outs
_FILES = 65536
_LIMIT_OF_RUN = 300.0  # seconds


@dataclass(frozen=True)
class _Kernel:
    name: str
    seconds: float


@dataclass
class _Node:
    """One node's leases, and which keys it has, or is asking for."""

    service: RedisLeases
    number: int
    have: set[str] = field(default_factory=set)
    asking: dict[str, asyncio.Task[bool]] = field(default_factory=dict)
    elsewhere: dict[str, float] = field(default_factory=dict)
    published: dict[str, float] = field(default_factory=dict)  # key → moment at which this node said that it is ready
    told: dict[str, float] = field(default_factory=dict)  # key → moment at which this node knew it of another
    compiles: int = 0

    async def walk(self, kernels: list[_Kernel]) -> None:
        busy = [kernel for kernel in kernels if not await self._claim(kernel, False)]
        for kernel in busy:
            await self._claim(kernel, True)

    async def _claim(self, kernel: _Kernel, waits: bool) -> bool:
        """False: somebody else compiles it, and this rank does not wait."""
        await asyncio.sleep(_CLAIM)
        name = kernel.name
        while name not in self.have:
            under_way = self.asking.get(name)
            if not waits and (under_way is not None or time.monotonic() < self.elsewhere.get(name, 0.0)):
                return False
            if under_way is None:
                under_way = self.asking[name] = asyncio.create_task(self._flight(kernel, waits))
            if not await asyncio.shield(under_way) and not waits:
                return False
        return True

    async def _flight(self, kernel: _Kernel, waits: bool) -> bool:
        def stays(wait: Wait) -> bool:
            self.elsewhere[kernel.name] = time.monotonic() + min(_BUSY_FOR, wait.ttl)
            return waits

        try:
            token = f"{self.number}.{kernel.name}"
            answer = await await_turn(self.service, kernel.name, token, f"node-{self.number}", stays=stays)
            if isinstance(answer, Lease):
                answer.keep_alive(_TTL)
                await asyncio.sleep(kernel.seconds)
                self.compiles += 1
                await answer.ready("5" * 64)
                self.published[kernel.name] = time.monotonic()
            if isinstance(answer, (Lease, Ready)):
                self.have.add(kernel.name)
            return answer is not None
        finally:
            del self.asking[kernel.name]

    def listen(self) -> None:
        """Note when news says that a key is ready, whether or not a rank waits for it."""
        hear = self.service._facts.hear

        def noting(key: str, answer: Any) -> None:
            if isinstance(answer, Ready):
                self.told.setdefault(key, time.monotonic())
            hear(key, answer)

        self.service._facts.hear = noting  # type: ignore[method-assign]


def run(nodes: list[int], ranks: int = 1) -> Result:
    """Herds of so many `nodes`, of `ranks` each."""
    kernels = recorded()
    result = Result(
        f"The leases of a herd: {len(kernels)} kernels, {ranks} rank{'s' * (ranks > 1)} of each node",
        [
            "nodes", "wall s", "compiles", "Redis commands per key and node", "script calls per key and node", "Redis CPU s",
            "connections of an agent", "Redis KiB of an agent", "published → told, median ms", "99 % ms",
        ],
        notes=[
            "real `RedisLeases` in few processes, without agents and store: the walk of `kcoord.warmup`, compiles are sleeps",
            "published → told: from the leader's READY in Redis until another node has heard it, over all nodes and keys",
            "the agents connect and follow before the clock starts; Redis CPU and commands are of the walk alone",
            "on few cores the agents' processes are slower than Redis: then the wall and what is told late are the machine's",
        ],
    )  # fmt: skip
    for count in sorted(nodes) or [8, 128]:
        result.rows.append(_herd(count, ranks, kernels))
        print(result.rows[-1], file=sys.stderr, flush=True)
    return result


def _herd(nodes: int, ranks: int, kernels: Kernels) -> list[str]:
    _allow_files()
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
            _tell(child, {**part, "kernels": kernels})
        for child in children:
            _hear(child)
        time.sleep(3.0)  # the server shrinks buffers of idle clients
        clients = int(client.info("clients")["connected_clients"]) - 1
        memory = int(client.info("memory")["used_memory"]) - memory
        before, cpu, begun = spent_commands(client), cpu_seconds_of(server.pid), time.monotonic() + 0.5
        for child in children:
            _tell(child, begun)
        found = [_hear(child) for child in children]
        wall, cpu = time.monotonic() - begun, cpu_seconds_of(server.pid) - cpu
        after = spent_commands(client)
    calls = {name: count - before.get(name, (0, 0))[0] for name, (count, _) in after.items()}
    sent = sum(calls.get(name, 0) for name in ("evalsha", "eval", "subscribe", "hgetall"))
    published = {key: moment for each in found for key, moment in each["published"].items()}
    late = sorted(
        1000 * (moment - published[key]) for each in found for told in each["told"] for key, moment in told.items()
    )
    per = len(kernels) * nodes
    return [
        str(nodes), f"{wall:.1f}", str(sum(each["compiles"] for each in found)), f"{sent / per:.3f}",
        f"{(calls.get('evalsha', 0) + calls.get('eval', 0)) / per:.3f}", f"{cpu:.2f}", f"{clients / nodes:.1f}",
        f"{memory / nodes / 1024:.1f}", *(f"{late[int(len(late) * q)]:.1f}" if late else "" for q in (0.5, 0.99)),
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
    times = {"ttl": _TTL, "limit": _LIMIT, "failure_ttl": _FAILURE_TTL}
    nodes = [_Node(RedisLeases(part["url"], "herd", **times), number) for number in part["mine"]]
    for first in range(0, len(nodes), _AT_ONCE):
        await asyncio.gather(*(node.service._tried_once() for node in nodes[first : first + _AT_ONCE]))
    for node in nodes:
        node.listen()
    kernels = [_Kernel(*kernel) for kernel in part["kernels"]]
    world = part["nodes"] * part["ranks"]
    orders = [order(kernels, rank, world) for node in nodes for rank in _ranks(node.number, part["ranks"])]
    gc.freeze()
    print(json.dumps("ready"), flush=True)
    begin = json.loads(await asyncio.to_thread(sys.stdin.readline))
    await asyncio.sleep(begin - time.monotonic())
    owners = [node for node in nodes for _ in range(part["ranks"])]
    walks = asyncio.gather(*(node.walk(each) for node, each in zip(owners, orders, strict=True)))
    await asyncio.wait_for(walks, _LIMIT_OF_RUN)
    await asyncio.sleep(0.5)  # the last news
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
