"""Torch's compile workers of a node's ranks: a pool for each rank, and one for all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from benchmarks.result import Result, adopt_orphans

_JOB = Path(__file__).with_name("compile_workers_job.py")
_RANKS, _WORKERS, _JOBS, _SECONDS = (int(os.environ.get("RANKS", "4")), int(os.environ.get("WORKERS", "8")), 20, 0.05)


def run() -> Result:
    adopt_orphans()
    result = Result(
        f"Compile workers of {_RANKS} ranks, {_WORKERS} each, {_JOBS} jobs of {_SECONDS} s of CPU a rank",
        ["pools", "wall s", "workers and pools: PSS MB", "processes"],
    )
    for name, shares in (("a pool for each rank, as in stock", "0"), ("one pool", "1")):
        result.rows.append([name, *_row(shares)])
    result.notes.append(
        "wall: from the start of the pools until the last rank has all results; every rank has imported torch"
    )
    return result


def _row(shares: str) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as root:
        more = {
            "KCOORD_LOCAL_DIR": f"{root}/local", "TMPDIR": root, "KCOORD_SHARE_WORKERS": shares, "WORLD_SIZE": str(_RANKS),
            "TORCHINDUCTOR_COMPILE_THREADS": str(_WORKERS),
        }  # fmt: skip
        command = [sys.executable, str(_JOB), str(_JOBS), str(_SECONDS)]
        pipe = subprocess.PIPE
        ranks = [
            subprocess.Popen(
                command, env={**os.environ, **more, "RANK": str(rank)}, stdin=pipe, stdout=pipe, text=True, cwd=root
            )
            for rank in range(_RANKS)
        ]
        for each in ranks:
            each.stdout.readline()
        for each in ranks:
            each.stdin.write("\n")
            each.stdin.flush()
        wall = max(json.loads(each.stdout.readline())["wall"] for each in ranks)
        mine = {each.pid for each in ranks}
        others = [each for each in psutil.Process().children(recursive=True) if each.pid not in mine]
        others = [each for each in others if "kcoord.agent" not in each.cmdline()]
        memory = sum(each.memory_full_info().pss for each in others)
        for each in ranks:
            each.stdin.close()
            each.wait()
        _, left = psutil.wait_procs(others, timeout=20)
        assert not left
    return [f"{wall:.1f}", f"{memory / 1e6:.0f}", str(len(others))]
