"""One run of a simulated cluster, all of it on this machine: each node an agent's process, and a process whose threads are its
ranks (`benchmarks.cluster.node`), or, of many, a light one (`benchmarks.cluster.light`); one redis-server and one store for all.
All ranks begin at one moment; the wall is until the last one has every kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import redis

from benchmarks.cluster import dilation
from benchmarks.cluster.node import Part
from benchmarks.cluster.processes import ClusterError, Load, Member, Processes
from tests.support.redis_server import RedisServer

Kernels = list[tuple[str, float]]
"""Names and compile seconds, longest first."""

_START = 90.0  # seconds for all nodes to be ready
_LEASES = (
    "evalsha",
    "eval",
    "subscribe",
    "unsubscribe",
)  # the agents' commands for leases; scripts send the rest themselves


@dataclass(frozen=True)
class Measured:
    """The result of a run.

    `wall`, `bound` and CPU in seconds, `agent_cpu` the mean of the agents; `compiled`: how often each kernel was; `reached`: how
    many kernels each rank ended with; `redis`: calls and microseconds of each command; `memory`: bytes of the server's clients;
    `told`: seconds from a publish to each rank that waited for it, `heard`: from a light node's READY to each light node that has
    heard it, in ascending order; `machine`: mean per cent of CPU, `ours`: of this run's processes, `saturated`: share of the time
    without idle CPU; `requests`: to the modelled NFS server; `agent_memory`: mean resident bytes of the agents' processes.
    """

    nodes: int
    ranks: int
    kernels: int
    wall: float
    bound: float
    compiled: dict[str, int]
    reached: list[int]
    alone: int
    agent_cpu: float
    redis_cpu: float
    redis: dict[str, tuple[int, int]]
    connections: int
    memory: int
    told: list[float]
    machine: float
    saturated: float
    said: list[str]
    ours: float = 0.0
    heard: list[float] = dataclasses.field(default_factory=list)
    requests: int = 0
    agent_memory: float = 0.0

    @property
    def compiles(self) -> int:
        return sum(self.compiled.values())

    @property
    def commands(self) -> int:
        """The agents' commands to Redis for leases."""
        return sum(self.redis.get(name, (0, 0))[0] for name in _LEASES)


def bound(kernels: Kernels, ranks: int) -> float:
    """Seconds that no schedule can beat: an equal share of the work, or the longest kernel."""
    return max(sum(seconds for _, seconds in kernels) / ranks, max(seconds for _, seconds in kernels))


class Server(Protocol):
    """The NFS server with the store. `environ` makes a process its client; `requests`: of all clients, so far."""

    @property
    def environ(self) -> dict[str, str]: ...

    @property
    def requests(self) -> int: ...


@dataclass(frozen=True)
class LightNodes:
    """Light nodes beside the whole ones; see `benchmarks.cluster.light.Light`."""

    count: int
    ranks: int
    fetch: int
    requests: int = 0


def play(
    root: Path,
    nodes: int,
    ranks: int,
    kernels: Kernels,
    *,
    together: bool,
    limit: float,
    in_a_process: int = 1,
    light: LightNodes | None = None,
    slower: float = 1.0,
    server: Server | None = None,
    settings: dict[str, str] | None = None,
    wraps: Sequence[tuple[str, ...]] = (),
    address: str = "127.0.0.1",
    prepare: Callable[[str], None] = lambda url: None,
) -> Measured:
    """A run below `root`, an empty directory with a short path: ``n0`` … are the nodes' local directories, ``store`` the store.

    With `together` the ranks walk as in `kcoord.warmup`, else each asks in the same order. Raises `ClusterError` if it takes
    longer than `limit` seconds, or a node fails. `in_a_process`: so many nodes share their processes. `slower`: the dilation, by
    which `kernels` and `server` are slower already. `settings`: more of kcoord's. `wraps`: put before
    the nodes' commands, one each, to lead them to other hosts, which see `root`, and Redis at `address`. ``prepare(url)`` gets
    the Redis before any node. No process outlives the call.
    """
    deadline = time.monotonic() + limit
    with contextlib.ExitStack() as stack:
        redis_server = stack.enter_context(RedisServer(tcp=True, host=address, options=["--maxclients", "20000"]))
        client = stack.enter_context(contextlib.closing(redis.Redis.from_url(redis_server.url)))
        prepare(redis_server.url)
        common = {
            "store": str(root / "store"),
            "store_create": "1",
            "redis_url": redis_server.url,
            "max_wait": f"{limit:.0f}",
            "job": "cluster",
            "spawn": "0",
            "agent_timeout": "60",  # one machine's cores serve all nodes
            **dilation.settings(slower),
            **(settings or {}),
        }
        world = nodes * ranks + (light.count * light.ranks if light is not None else 0)
        parts = [
            Part(n, n * ranks, ranks, world, together, {**common, "local_dir": str(root / f"n{n}")}, kernels, slower)
            for n in range(nodes)
        ]
        groups = [parts[first : first + in_a_process] for first in range(0, nodes, in_a_process)]
        members = [
            Member("node", group[0].node, [dataclasses.asdict(part) for part in group], wrap)
            for group, wrap in zip(groups, wraps or [()] * len(groups), strict=True)
        ]
        if light is not None and light.count:
            members += _light_members(light, parts[0], nodes)
        requests = server.requests if server is not None else 0
        cluster = stack.enter_context(Processes(members, root, server.environ if server is not None else {}))
        cluster.hear(min(deadline, time.monotonic() + _START * slower), "start")
        if server is not None and not common.get("profile"):  # else the pack is read as soon as the agents start
            requests = server.requests
        before, cpu = spent_commands(client), cpu_seconds_of(redis_server.pid)
        begin = time.monotonic() + 0.2 + 0.002 * nodes
        cluster.tell(str(begin))
        with Load(begin) as load:
            found = cluster.hear(deadline, "finish")
        requests = server.requests - requests if server is not None else 0
        after, cpu = spent_commands(client), cpu_seconds_of(redis_server.pid) - cpu
        connections = int(client.info("clients")["connected_clients"]) - 1
        memory = int(client.info("memory")["mem_clients_normal"])
    whole = found[: len(groups)]
    errors = [error for f in whole for error in f["errors"]]
    if errors:
        raise ClusterError(f"{nodes} nodes: {len(errors)} errors in ranks, the first: {errors[0]}")
    spent = {c: (n - before.get(c, (0, 0))[0], t - before.get(c, (0, 0))[1]) for c, (n, t) in after.items()}
    wall = max(f["finished"] for f in found) - begin
    return Measured(
        nodes + (light.count if light is not None else 0),
        world,
        len(kernels),
        wall=wall,
        bound=bound(kernels, world),
        compiled=dict(sum((Counter(f["compiled"]) for f in found), Counter())),
        reached=[n for f in whole for n in f["reached"]],
        alone=sum(f["alone"] for f in whole),
        agent_cpu=sum(f["agent_cpu"] for f in whole) / nodes,
        redis_cpu=cpu,
        redis={command: cost for command, cost in spent.items() if cost[0]},
        connections=connections,
        memory=memory,
        told=_told(found),
        machine=load.mean,
        saturated=load.saturated,
        said=cluster.said(),
        ours=100 * (cpu + sum(f["cpu"] for f in found)) / wall / len(os.sched_getaffinity(0)),
        heard=_heard(found),
        requests=requests,
        agent_memory=sum(f["agent_memory"] for f in whole) / nodes,
    )


def _light_members(light: LightNodes, like: Part, whole: int) -> list[Member]:
    """One process a core."""
    processes = min(light.count, len(os.sched_getaffinity(0)))
    common = {
        "ranks": light.ranks, "world": like.world, "together": like.together, "settings": like.settings,
        "kernels": like.kernels, "dilation": like.dilation, "fetch": light.fetch, "requests": light.requests,
    }  # fmt: skip
    members = []
    first = 0
    for n in range(processes):
        count = light.count // processes + (n < light.count % processes)
        numbers = list(range(whole + first, whole + first + count))
        rank = whole * like.ranks + first * light.ranks
        members.append(Member("light", numbers[0], {**common, "numbers": numbers, "first": rank}))
        first += count
    return members


def _told(found: list[dict[str, Any]]) -> list[float]:
    published = {name: moment for f in found for name, moment in f["published"].items()}
    waits = (wait for f in found for wait in f.get("waited", ()))
    return sorted(end - published[name] for name, begun, end in waits if begun < published.get(name, begun) < end)


def _heard(found: list[dict[str, Any]]) -> list[float]:
    announced = {key: moment for f in found for key, moment in f.get("announced", {}).items()}
    heard = ((key, moment) for f in found for key, moments in f.get("heard", {}).items() for moment in moments)
    return sorted(moment - announced[key] for key, moment in heard if key in announced)


def spent_commands(client: redis.Redis) -> dict[str, tuple[int, int]]:
    """Calls and microseconds of each command since the server began."""
    info: dict[str, Any] = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): (int(cost["calls"]), int(cost["usec"])) for name, cost in info.items()}


def cpu_seconds_of(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
