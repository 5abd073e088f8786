"""The footprint of kcoord: import time, the agent's memory and start."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

import psutil

from benchmarks.result import Result
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

_ROUNDS = 15


def run() -> Result:
    result = Result("What kcoord costs by being there", ["what", "median", "goal"])
    empty, imported, connected = (
        statistics.median(_seconds(s) for _ in range(_ROUNDS))
        for s in ("pass", "import kcoord", "import kcoord; kcoord.connect")
    )
    result.rows.append(["import kcoord", f"{(imported - empty) * 1000:.1f} ms", "below 50 ms"])
    result.rows.append(["and of all that a rank uses of it", f"{(connected - empty) * 1000:.1f} ms", ""])
    starts, memory = zip(*(_agent() for _ in range(5)), strict=True)
    result.rows.append(
        ["first answer of an agent that had to be started", f"{statistics.median(starts) * 1000:.0f} ms", ""]
    )
    result.rows.append(
        ["the agent's resident memory, with Redis", f"{statistics.median(memory):.1f} MB", "below 60 MB"]
    )
    result.notes.append(f"imports: medians of {_ROUNDS} new processes, less an empty Python's")
    return result


def _seconds(statement: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - begun


def _agent() -> tuple[float, float]:
    """Seconds to the first answer, and MB of memory, of an agent that also has Redis's client and a store."""
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as directory:
        settings = Settings.from_environ(
            {
                **os.environ,
                "KCOORD_LOCAL_DIR": f"{directory}/local",
                "KCOORD_STORE": f"{directory}/store",
                "KCOORD_STORE_CREATE": "1",
                "KCOORD_REDIS_URL": "redis://127.0.0.1:1/0",
            }
        )
        client = AgentClient(settings, Notices())
        begun = time.perf_counter()
        status = client.status()
        took = time.perf_counter() - begun
        assert status is not None
        memory = psutil.Process(status["pid"]).memory_info().rss / 1e6
        client.stop()
        client.close()
        psutil.wait_procs([psutil.Process(status["pid"])] if psutil.pid_exists(status["pid"]) else [], timeout=10)
    return took, memory
