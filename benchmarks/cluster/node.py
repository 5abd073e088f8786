"""``python -m benchmarks.cluster.node``: nodes of the simulated cluster, mostly one: its agent, and its ranks as threads.

Reads a list of `Part` as one line of JSON, and writes a line when the agents answer and every rank is connected. Then reads the
moment at which all nodes begin (seconds of the host's monotonic clock), and writes the result. The end of its input ends the
benchmark at any time. The agents of several nodes share a process (`benchmarks.cluster.agents`).

The agent's process with its queue, `Coordinator` and the warm-up's walk are a job's. Only the compiler is not: it sleeps for the
recorded seconds of the kernel, and writes a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget
from kcoord.packs.recipe import Recipe
from kcoord.protocol import endpoint
from kcoord.rank import spawn
from kcoord.rank.client import AgentClient
from kcoord.rank.coordinator import Busy, Coordinator
from kcoord.replay.recipes import settled
from kcoord.replay.warmup import Report, Walk, announced
from kcoord.settings import Settings

_DEVICE = DeviceKey(GPUTarget("cuda", 90, 32), 0)
_WORDS = 480  # each 32 bytes of a file, so that it has 15 KiB, as a small Triton kernel in the store


@dataclass(frozen=True)
class Part:
    """A node's part: its `ranks`, of which `first` is the first of `world`. `kernels`: names and compile seconds, longest first.

    `settings`: kcoord's, by name, as text. `dilation`: see `benchmarks.cluster.dilation`.
    """

    node: int
    first: int
    ranks: int
    world: int
    together: bool
    settings: dict[str, str]
    kernels: list[tuple[str, float]]
    dilation: float = 1.0


class Rank:
    """One rank: `run` asks for every kernel, and compiles those that it leads."""

    def __init__(self, part: Part, number: int, settings: Settings) -> None:
        self.part, self.number = part, number
        self.coordinator = Coordinator(settings)
        self.compiled: Counter[str] = Counter()
        self.published: dict[str, float] = {}  # kernel → moment
        self.waited: dict[str, tuple[float, float]] = {}  # kernel → begin and end of a claim that could wait
        self.report = Report()
        self.finished = 0.0
        self.error = ""
        self._tasks = [self._task(name, seconds) for name, seconds in part.kernels]  # each: ``run(waits)``

    def connect(self) -> None:
        """Make the connection that the first claim will use. Raises RuntimeError if there is no agent."""
        if self.coordinator._client.status() is None:
            raise RuntimeError("the agent does not answer")

    def run(self, begin: float) -> None:
        time.sleep(max(0.0, begin - time.monotonic()))
        try:
            if self.part.together:
                self._together()
            else:
                for run in self._tasks:  # like a training script: every rank in the same order, waiting for each
                    how = run(True)
                    self.report.compiled += how == "compiled"
                    self.report.loaded += how == "loaded"
        except Exception as error:  # noqa: BLE001 - this rank's result, with which the benchmark ends
            self.error = f"rank {self.number}: {type(error).__name__}: {error}"
        self.finished = time.monotonic()

    def _together(self) -> None:
        """As `kcoord.warmup`, of recipes that only this program can compile."""
        client, walk = AgentClient(self.coordinator.settings, self.coordinator.notices), Walk(self.coordinator, 0)
        recipes = [
            Recipe("simulated", "kernels", f"k{n}", {}, "cuda:90", seconds, n)
            for n, (_, seconds) in enumerate(self.part.kernels)
        ]
        if not announced(client, recipes, self.part.node, self.part.world // self.part.ranks, 0):
            raise RuntimeError("the agent does not answer")

        def own(recipe: Recipe) -> tuple[str, Callable[[bool], tuple[str, str]]]:
            return recipe.qualname, lambda waits: settled(lambda: self._tasks[recipe.order](waits))

        walk.queue(client, len(recipes), own)
        walk.report.loaded += walk.others
        client.close()
        self.report = walk.report

    def _task(self, name: str, seconds: float) -> Callable[[bool], str]:
        key = key_of(name, seconds)
        content = content_of(name)

        def run(waits: bool) -> str:
            compiled = False

            def compile(staging: Path) -> None:
                nonlocal compiled
                compiled = True
                self.compiled[name] += 1
                time.sleep(seconds)
                (staging / "kernel.cubin").write_bytes(content)

            begun = time.monotonic()
            found = self.coordinator.ensure(key, _DEVICE, compile, wait=waits)
            if compiled:
                self.published[name] = time.monotonic()
            elif waits:
                self.waited[name] = begun, time.monotonic()
            return "busy" if isinstance(found, Busy) else "compiled" if compiled else "loaded"

        return run


def key_of(name: str, seconds: float) -> CacheKey:
    return CacheKey.of("simulated", name, seconds=seconds)


def content_of(name: str) -> bytes:
    """The file that a kernel's compile writes: a few KiB that do not compress."""
    return b"".join(hashlib.sha256(f"{name} {n}".encode()).digest() for n in range(_WORDS))


def main() -> None:
    parts = [Part(**part) for part in json.loads(sys.stdin.readline())]
    nodes = [(part, Settings.from_environ({}, **part.settings)) for part in parts]
    for _, settings in nodes:
        settings.local_dir.mkdir(parents=True)
    log = (nodes[0][1].local_dir / "agent.log").open("wb")
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(endpoint.bind(settings.socket_path)) for _, settings in nodes]
        if len(nodes) == 1 and parts[0].dilation == 1:
            arguments = ["--parent", str(os.getpid())]
            agent = spawn.start_process(listeners[0], arguments, nodes[0][1], log.fileno())
        else:
            agent = _start_agents(parts, listeners, log.fileno())
    threading.Thread(target=_serve, args=(nodes, agent), daemon=True).start()
    _ended.wait()
    if agent.stdin is not None:
        agent.stdin.close()
    agent.terminate()
    try:
        agent.wait(15)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()
    sys.stdout.flush()
    os._exit(0)  # ranks that still sleep need not wake


_ended = threading.Event()


def _start_agents(parts: list[Part], listeners: list[socket.socket], output: int) -> subprocess.Popen[bytes]:
    fds = [listener.fileno() for listener in listeners]
    agents = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.cluster.agents"],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        pass_fds=fds,
    )
    assert agents.stdin is not None
    described = [(fd, part.settings) for fd, part in zip(fds, parts, strict=True)]
    agents.stdin.write(json.dumps([parts[0].dilation, described]).encode() + b"\n")
    agents.stdin.flush()
    return agents


def _serve(nodes: list[tuple[Part, Settings]], agent: subprocess.Popen[bytes]) -> None:
    """Sets `_ended` at the end of the input, whatever the ranks do."""
    try:
        ranks = [Rank(part, part.first + n, settings) for part, settings in nodes for n in range(part.ranks)]
        for rank in ranks:
            rank.connect()
        _say({"agent": agent.pid})
        begin = sys.stdin.readline()
        if begin:
            threading.Thread(target=_play, args=(ranks, float(begin), agent.pid), daemon=True).start()
            sys.stdin.read()
    finally:
        _ended.set()


def _play(ranks: list[Rank], begin: float, agent: int) -> None:
    before, own = _cpu_seconds(agent), time.process_time()
    threads = [threading.Thread(target=rank.run, args=(begin,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [f"{name}: {why}" for rank in ranks for name, why in rank.report.failed]
    _say(
        {
            "finished": max(rank.finished for rank in ranks),
            "compiled": dict(sum((rank.compiled for rank in ranks), Counter())),
            "reached": [rank.report.compiled + rank.report.loaded for rank in ranks],
            "errors": [rank.error for rank in ranks if rank.error] + failed,
            "alone": sum(rank.coordinator.counters.read()["alone"] for rank in ranks),
            "agent_cpu": _cpu_seconds(agent) - before,
            "agent_memory": psutil.Process(agent).memory_info().rss,
            "cpu": _cpu_seconds(agent) - before + time.process_time() - own,
            "published": {name: moment for rank in ranks for name, moment in rank.published.items()},
            "waited": [
                (name, *times) for rank in ranks for name, times in rank.waited.items() if times[1] - times[0] > 0.001
            ],
        }
    )


def _cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
