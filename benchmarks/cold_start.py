"""Four ranks, twenty kernels, cold: without kcoord and with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.result import Result
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord_launch.supervise import Supervisor

_RANKS, _KERNELS, _ROUNDS = 4, 20, 3
_RANK = Path(__file__).parents[1] / "tests" / "support" / "programs" / "rank.py"


def run() -> Result:
    title = f"Cold start: {_RANKS} ranks, the same {_KERNELS} kernels for sm_90"
    result = Result(title, ["cache", "compiles", "wall s", "CPU s", "CPU ratio to a shared cache"])
    figures = {name: _best(name) for name in ("a private cache per rank", "one shared TRITON_CACHE_DIR", "kcoord")}
    shared = figures["one shared TRITON_CACHE_DIR"][2]
    for name, (compiles, wall, cpu) in figures.items():
        result.rows.append([name, str(compiles), f"{wall:.1f}", f"{cpu:.1f}", f"{cpu / shared:.2f}"])
    result.notes.append(f"the fastest of {_ROUNDS} runs of each; wall and CPU seconds of the ranks, from start to end")
    result.notes.append("a rank's start (importing Triton, hashing its library) is about a second of CPU in every row")
    return result


def _best(name: str) -> tuple[int, float, float]:
    return min((_once(name) for _ in range(_ROUNDS)), key=lambda figures: figures[1])


def _once(name: str) -> tuple[int, float, float]:
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as directory, _agent(name, directory):
        gate = Path(directory) / "gate"
        ranks = []
        before = os.times()
        for rank in range(_RANKS):
            command = [sys.executable, str(_RANK), "--kernels", str(_KERNELS), "--gate", str(gate)]
            environment = _environment(name, directory, rank)
            ranks.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            )
        while len(list(gate.parent.glob("gate.*"))) < _RANKS:
            time.sleep(0.005)
        begun = time.perf_counter()
        gate.touch()
        outputs = [r.communicate()[0] for r in ranks]
        wall, after = time.perf_counter() - begun, os.times()
    compiles = sum(len(json.loads(o.splitlines()[-1])["compiled"]) for o in outputs)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return compiles, wall, cpu


@contextmanager
def _agent(name: str, directory: str) -> Iterator[None]:
    """kcoord's agent runs before its ranks do, as under its launchers."""
    if name != "kcoord":
        yield
        return
    supervisor = Supervisor(Settings.from_environ(_environment(name, directory, 0)))
    supervisor.start()
    client = AgentClient(supervisor.settings, Notices())
    client.status()
    client.close()
    try:
        yield
    finally:
        supervisor.stop()


def _environment(name: str, directory: str, rank: int) -> dict[str, str]:
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "TRITON_DEFAULT_FP_FUSION": "1"}
    if name == "kcoord":
        local = f"{directory}/local"
        return environment | {
            "KCOORD_LOCAL_DIR": local,
            "KCOORD_IDLE_TIMEOUT": "1",
            "TRITON_CACHE_DIR": f"{local}/triton",
            "TRITON_CACHE_MANAGER": "kcoord.backends.triton.cache_manager:TritonCacheManager",
        }
    leaf = f"rank{rank}" if "private" in name else "all"
    return environment | {"TRITON_CACHE_DIR": f"{directory}/{leaf}"}
