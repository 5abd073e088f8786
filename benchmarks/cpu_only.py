"""Cold start without a GPU: real kernels cross-compiled for sm_90 by 2, 4 and 8 ranks on this machine's cores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from benchmarks.result import Result
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord_launch.supervise import Supervisor

_RANKS, _KERNELS = (2, 4, 8), 24
_JOB = "benchmarks.cpu_only_job"
_PLANS = (
    ("a private cache per rank", "together"),
    ("one shared TRITON_CACHE_DIR", "together"),
    ("rank 0 first, then the others", "rank0"),
    ("kcoord, no profile", "together"),
    ("kcoord, with its profile", "profile"),
    ("split over the ranks by hand", "split"),
)


def run() -> Result:
    result = Result(
        f"Cold start without a GPU: {_KERNELS} kernels for sm_90",
        ["ranks", "cache", "wall s", "wall ratio to a shared cache", "compiles", "CPU s", "CPU s ÷ (ranks × stock)"],
    )
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as root:
        (alone,) = _once("alone", "together", 1, Path(root, "alone"))
        stock = alone["cpu"]
        for ranks in _RANKS:
            figures = {}
            for number, (name, mode) in enumerate(_PLANS):
                directory = Path(root, f"{ranks}.{number}")
                if mode == "profile":  # cold: only the recipes exist
                    shutil.copytree(
                        Path(root, f"{ranks}.{number - 1}", "local", "profiles"), directory / "local" / "profiles"
                    )
                figures[name] = _once(name, mode, ranks, directory)
            shared = max(line["wall"] for line in figures["one shared TRITON_CACHE_DIR"])
            for name, lines in figures.items():
                wall, cpu = max(line["wall"] for line in lines), sum(line["cpu"] for line in lines)
                cells = [f"{wall:.1f}", f"{wall / shared:.2f}", str(sum(line["compiles"] for line in lines))]
                result.rows.append([str(ranks), name, *cells, f"{cpu:.1f}", f"{cpu / (ranks * stock):.2f}"])
    result.notes += [
        f"stock: {stock:.1f} CPU s, one rank that compiles all {_KERNELS} with a cache of its own",
        "one run of each; seconds from the moment at which all ranks have imported Triton until the last is done; CPU seconds of "
        "the ranks, their assemblers and kcoord's agent",
        "each process also hashes Triton's own library (about a second of CPU) unless kcoord has done so on this machine",
    ]
    return result


def _once(name: str, mode: str, ranks: int, directory: Path) -> list[dict[str, Any]]:
    (directory / "meet").mkdir(parents=True)
    ours = name.startswith("kcoord")
    local = directory / "local"
    variables = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("KCOORD_", "TRITON_CACHE"))},
        "TRITON_DEFAULT_FP_FUSION": "1",
        "WORLD_SIZE": str(ranks),
        "KCOORD_LOCAL_DIR": str(local),
    }
    if ours:
        variables |= {
            "TRITON_CACHE_MANAGER": "kcoord.backends.triton.cache_manager:TritonCacheManager",
            "TRITON_CACHE_DIR": f"{local}/triton",
        }
        variables |= {"KCOORD_PROFILE": "cpu_only"} if mode == "together" else {}
    supervisor = Supervisor(Settings.from_environ(variables)) if ours else None
    if supervisor is not None:
        supervisor.start()
    try:
        processes = []
        for rank in range(ranks):
            leaf = f"rank{rank}" if "private" in name else "all"
            own = {} if ours else {"TRITON_CACHE_DIR": str(directory / leaf)}
            command = [sys.executable, "-m", _JOB, mode, str(_KERNELS), str(directory / "meet")]
            environment = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank), **own}
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        outputs = [process.communicate(timeout=600) for process in processes]
        lines = [json.loads(out.splitlines()[-1]) if out else {} for out, _ in outputs]
        if not all(lines):
            raise SystemExit(f"benchmark cpu_only: a rank of {name!r} failed:\n{outputs[lines.index({})][1][-2000:]}")
        if supervisor is not None:
            lines[0]["cpu"] += _agent_cpu(supervisor.settings)
        return lines
    finally:
        if supervisor is not None:
            supervisor.stop()


def _agent_cpu(settings: Settings) -> float:
    client = AgentClient(settings, Notices())
    status = client.status()
    client.close()
    assert status is not None
    times = psutil.Process(status["pid"]).cpu_times()
    return float(times.user + times.system)
