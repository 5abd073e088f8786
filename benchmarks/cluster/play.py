"""One run of a simulated cluster, all of it on this machine: each node an agent's process, and a process whose threads are its
ranks (`benchmarks.cluster.node`); one redis-server and one store for all. All ranks begin at one moment; the wall is until the
last one has every kernel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis

from benchmarks.cluster.node import Part
from tests.support.redis_server import RedisServer

Kernels = list[tuple[str, float]]
"""Names and compile seconds, longest first."""

_START = 90.0  # seconds for all nodes to be ready
_END = 20.0  # seconds for all nodes to end
_SATURATED = 90.0  # per cent of this machine's CPU
_LEASES = (
    "evalsha",
    "eval",
    "subscribe",
    "unsubscribe",
)  # the agents' commands for leases; scripts send the rest themselves
_ROOT = Path(__file__).resolve().parents[2]


class ClusterError(Exception):
    """A run that failed; the message has the reason."""


@dataclass(frozen=True)
class Measured:
    """The result of a run.

    `wall`, `bound` and CPU in seconds, `agent_cpu` the mean of the agents; `compiled`: how often each kernel was; `reached`: how
    many kernels each rank ended with; `redis`: calls and microseconds of each command; `memory`: bytes of the server's clients;
    `told`: seconds from a publish to each rank that waited for it, in ascending order; `machine`: mean per cent of CPU,
    `saturated`: share of the time without idle CPU.
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

    @property
    def compiles(self) -> int:
        return sum(self.compiled.values())

    @property
    def commands(self) -> int:
        """The agents' commands to Redis for leases, without those for statistics."""
        return sum(self.redis.get(name, (0, 0))[0] for name in _LEASES)


def bound(kernels: Kernels, ranks: int) -> float:
    """Seconds that no schedule can beat: an equal share of the work, or the longest kernel."""
    return max(sum(seconds for _, seconds in kernels) / ranks, max(seconds for _, seconds in kernels))


def play(
    root: Path, nodes: int, ranks: int, kernels: Kernels, *, together: bool, limit: float, in_a_process: int = 1
) -> Measured:
    """A run below `root`, an empty directory with a short path: ``n0`` … are the nodes' local directories.

    With `together` the ranks walk as in `kcoord.warmup`, else each asks in the same order. Raises `ClusterError` if it takes
    longer than `limit` seconds, or a node fails. `in_a_process`: so many nodes share their processes. No process outlives the
    call.
    """
    deadline = time.monotonic() + limit
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(RedisServer(tcp=True))
        client = stack.enter_context(contextlib.closing(redis.Redis.from_url(server.url)))
        settings = {
            "store": str(root / "store"),
            "store_create": "1",
            "redis_url": server.url,
            "max_wait": f"{limit:.0f}",
            "job": "cluster",
            "spawn": "0",
            "agent_timeout": "60",  # one machine's cores serve all nodes
        }
        parts = [
            Part(n, nodes, ranks, together, {**settings, "local_dir": str(root / f"n{n}")}, kernels)
            for n in range(nodes)
        ]
        groups = [parts[first : first + in_a_process] for first in range(0, nodes, in_a_process)]
        cluster = stack.enter_context(_Cluster(groups, root))
        cluster.hear(min(deadline, time.monotonic() + _START), "start")
        before, cpu = spent_commands(client), cpu_seconds_of(server.pid)
        begin = time.monotonic() + 0.2 + 0.002 * nodes
        cluster.tell(str(begin))
        with _Load(begin) as load:
            found = cluster.hear(deadline, "finish")
        after, cpu = spent_commands(client), cpu_seconds_of(server.pid) - cpu
        connections = int(client.info("clients")["connected_clients"]) - 1
        memory = int(client.info("memory")["mem_clients_normal"])
    errors = [error for f in found for error in f["errors"]]
    if errors:
        raise ClusterError(f"{nodes} nodes: {len(errors)} errors in ranks, the first: {errors[0]}")
    spent = {c: (n - before.get(c, (0, 0))[0], t - before.get(c, (0, 0))[1]) for c, (n, t) in after.items()}
    return Measured(
        nodes,
        nodes * ranks,
        len(kernels),
        wall=max(f["finished"] for f in found) - begin,
        bound=bound(kernels, nodes * ranks),
        compiled=dict(sum((Counter(f["compiled"]) for f in found), Counter())),
        reached=[n for f in found for n in f["reached"]],
        alone=sum(f["alone"] for f in found),
        agent_cpu=sum(f["agent_cpu"] for f in found) / nodes,
        redis_cpu=cpu,
        redis={command: cost for command, cost in spent.items() if cost[0]},
        connections=connections,
        memory=memory,
        told=_told(found),
        machine=load.mean,
        saturated=load.saturated,
        said=cluster.said(),
    )


class _Cluster:
    """The nodes' processes. All have ended when the block is left, and their agents too."""

    def __init__(self, groups: list[list[Part]], root: Path) -> None:
        self._groups, self._root = groups, root
        self._processes: list[subprocess.Popen[str]] = []
        self._lines: list[queue.Queue[str]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> _Cluster:
        try:
            for group in self._groups:
                self._start(group)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, group: list[Part]) -> None:
        with (self._root / f"n{group[0].node}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.cluster.node"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=_ROOT,
                start_new_session=True,  # the keyboard interrupts us, and we end them
            )  # fmt: skip
        lines: queue.Queue[str] = queue.Queue()
        self._processes.append(process)
        self._lines.append(lines)
        self._readers.append(threading.Thread(target=_read, args=(process, lines), daemon=True))
        self._readers[-1].start()
        _tell(process, json.dumps([dataclasses.asdict(part) for part in group]))

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()  # asks it to end
        deadline = time.monotonic() + _END
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                agents = psutil.Process(process.pid).children()
                process.kill()
                process.wait()
                for agent in agents:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        agent.kill()
        for reader in self._readers:
            reader.join(_END)

    def tell(self, line: str) -> None:
        for process in self._processes:
            _tell(process, line)

    def hear(self, deadline: float, what: str) -> list[dict[str, Any]]:
        """The next line of each node. Raises `ClusterError` if one has none until `deadline`, a moment of the monotonic clock."""
        found: dict[int, dict[str, Any]] = {}
        for n, lines in enumerate(self._lines):
            try:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing, one = sum(q.empty() for q in self._lines[n:]), self._first(n)
                raise ClusterError(
                    f"{missing} of {len(self._lines)} nodes did not {what} in time, node {one} among them{self._last(n)}"
                ) from None
            if not line:
                code = self._processes[n].wait()
                raise ClusterError(
                    f"node {self._first(n)} ended with code {code} before it could {what}{self._last(n)}"
                )
            found[n] = json.loads(line)
        return list(found.values())

    def _first(self, n: int) -> int:
        """The first node of the processes with number `n`."""
        return self._groups[n][0].node

    def _last(self, n: int) -> str:
        lines = self._log(n)
        return f"; its last words: {' / '.join(lines[-3:])}" if lines else ""

    def said(self) -> list[str]:
        """The lines that nodes and agents logged, each once."""
        return sorted({line for n in range(len(self._groups)) for line in self._log(n)})

    def _log(self, n: int) -> list[str]:
        name = f"n{self._first(n)}"
        logs = (self._root / f"{name}.log", self._root / name / "agent.log")
        return [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()]


def _told(found: list[dict[str, Any]]) -> list[float]:
    published = {name: moment for f in found for name, moment in f["published"].items()}
    waits = (wait for f in found for wait in f["waited"])
    return sorted(end - published[name] for name, begun, end in waits if begun < published.get(name, begun) < end)


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended: `hear` raises the reason
        process.stdin.write(line + "\n")
        process.stdin.flush()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put("")


class _Load:
    """This machine's CPU while the block runs, from the moment `begin` of the monotonic clock."""

    def __init__(self, begin: float) -> None:
        self._begin, self._over = begin, threading.Event()
        self._samples: list[float] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _Load:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        time.sleep(max(0.0, self._begin - time.monotonic()))
        psutil.cpu_percent()
        while not self._over.wait(0.2):
            self._samples.append(psutil.cpu_percent())

    @property
    def mean(self) -> float:
        return sum(self._samples) / max(1, len(self._samples))

    @property
    def saturated(self) -> float:
        return sum(sample >= _SATURATED for sample in self._samples) / max(1, len(self._samples))


def spent_commands(client: redis.Redis) -> dict[str, tuple[int, int]]:
    """Calls and microseconds of each command since the server began."""
    info: dict[str, Any] = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): (int(cost["calls"]), int(cost["usec"])) for name, cost in info.items()}


def cpu_seconds_of(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
