"""Redis' size: the formula of `docs/kubernetes.md`, the manifest's bounds, and what a real server needs."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import time

import redis

from kcoord.leases.redis import RedisLeases
from tests.cluster.k8s.manifests import ROOT, objects, pods
from tests.support.redis_server import RedisServer

PAGE = " ".join((ROOT / "docs" / "kubernetes.md").read_text().split())
FORMULA = re.search(r"maxmemory = (\d+) bytes × kernels [^+]*\+ (\d+) KiB × nodes", PAGE)
KERNELS = 10_000


def test_redis_has_room_for_what_the_page_says() -> None:
    example = re.search(r"(\d+) MiB, the default, are enough for ([\d,]+) kernels and ([\d,]+) nodes", PAGE)
    assert FORMULA is not None
    assert example is not None
    most, kernels, nodes = (int(figure.replace(",", "")) for figure in example.groups())
    needed = int(FORMULA[1]) * kernels + (int(FORMULA[2]) << 10) * nodes
    (redis,) = (pod for pod in pods(objects("base")) if pod.of["kind"] == "Deployment")
    (container,) = redis.containers
    command = container["command"]
    assert command[command.index("--maxmemory") + 1] == f"{most}mb"
    assert container["resources"]["limits"]["memory"] == f"{most * 4 // 3}Mi"
    assert 0.8 * (most << 20) < needed <= most << 20


async def test_a_kernel_and_a_node_cost_less_than_the_formula_says() -> None:
    assert FORMULA is not None
    with RedisServer() as server, redis.Redis.from_url(server.url) as asked:
        nodes = [RedisLeases(server.url, "default", ttl=15, limit=900, failure_ttl=30) for _ in range(20)]
        await nodes[0].ready(_digest(-1), _digest(-1))  # the server knows the script
        used = _used(asked)
        for n in range(KERNELS):
            await nodes[0].ready(_digest(n), _digest(KERNELS + n))
        of_kernels = (_used(asked) - used) / KERNELS
        used = _used(asked)
        for node in nodes[1:]:  # one connection for commands, and one for news
            async with node.watch(_digest(0)):
                await node.ready(_digest(0), _digest(0))
        begun, of_nodes = time.monotonic(), math.inf
        while of_nodes >= int(FORMULA[2]) << 10:  # the server frees the buffers of idle connections after a second
            assert time.monotonic() < begun + 20, of_nodes
            await asyncio.sleep(0.1)
            of_nodes = (_used(asked) - used) / len(nodes[1:])
        for node in nodes:
            await node.close()
    assert 100 < of_kernels < int(FORMULA[1])
    assert of_nodes > 10 << 10


def _digest(n: int) -> str:
    return hashlib.sha256(str(n).encode()).hexdigest()


def _used(server: redis.Redis) -> int:
    found: dict[str, int] = server.info("memory")  # type: ignore[assignment, unused-ignore]
    return found["used_memory"]
