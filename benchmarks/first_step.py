"""Whole jobs, from the launch until the slowest rank has all its kernels: stock, and kcoord with all that it may know ahead."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.result import Result, figures
from kcoord.cgroups import cores

_JOB = Path(__file__).with_name("first_step_job.py")
_ROOT = Path(__file__).parents[1]
_STOCK, _OURS = "torch.distributed.run", "kcoord_launch.torchrun"
_ROUNDS = 3


def run() -> Result:
    here = int(cores())
    ranks, kernels = max(1, min(8, here // 2)), 24 if here < 8 else 120
    result = Result(
        f"Whole job on {ranks} ranks and {here} cores: {kernels} kernels for sm_90, no GPU",
        ["job", "whole job s", "kernels' part s", "compiles of the ranks", "ratio to stock", "ratio to warm"],
    )
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as root:
        rows = {name: [] for name in ("stock", "first", "known", "without pool", "new keys", "guessed", "warm")}
        for number in range(_ROUNDS):
            for name, found in _round(Path(root, str(number)), ranks, kernels).items():
                rows[name].append(found)
    best = {name: min(found, key=lambda figures: figures["wall"]) for name, found in rows.items()}
    names = {
        "stock": "torchrun, one shared TRITON_CACHE_DIR, cold",
        "first": "kcoord-torchrun, first run ever",
        "known": "kcoord-torchrun, cold, run before",
        "without pool": "the same with KCOORD_POOL_WORKERS=0",
        "new keys": "kcoord-torchrun, run before, an option of Triton changed: every key is new",
        "guessed": "kcoord-torchrun, first run, another script with other kernels of the modules was run before",
        "warm": "kcoord-torchrun, warm",
    }
    for name, shown in names.items():
        found = best[name]
        wall = found["wall"]
        cells = [f"{wall:.1f}", f"{found['phase']:.1f}", str(found["compiles"])]
        result.rows.append([shown, *cells, f"{wall / best['stock']['wall']:.2f}", f"{wall / best['warm']['wall']:.2f}"])
    result.notes.append(
        f"the fastest of {_ROUNDS} runs of each, in turns; a job imports torch and forms a process group, as training does"
    )
    result.notes.append("compiles of the ranks: those of the pool are not among them")
    return result


def _round(directory: Path, ranks: int, kernels: int) -> dict[str, dict[str, Any]]:
    def kcoord(name: str, profiles: str = "", offset: int = 0, script: Path = _JOB, **more: str) -> dict[str, Any]:
        local = directory / name
        if profiles:  # cold: only the recipes exist
            local.mkdir(mode=0o700, parents=True)
            shutil.copytree(directory / profiles / "profiles", local / "profiles")
        return _once(_OURS, script, ranks, kernels, offset, {"KCOORD_LOCAL_DIR": str(local), **more})

    directory.mkdir()
    other = directory / "another.py"
    other.write_text(_JOB.read_text())
    found = {
        "stock": _once(_STOCK, _JOB, ranks, kernels, 0, {"TRITON_CACHE_DIR": str(directory / "stock")}),
        "first": kcoord("first"),
        "known": kcoord("known", "first"),
        "without pool": kcoord("without", "first", KCOORD_POOL_WORKERS="0"),
        "new keys": kcoord("new", "first", TRITON_DEFAULT_FP_FUSION="0"),
    }
    kcoord("elsewhere", script=other, offset=1)
    found["guessed"] = kcoord("guessed", "elsewhere")
    found["warm"] = kcoord("first")
    return found


def _once(launcher: str, script: Path, ranks: int, kernels: int, offset: int, more: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node", str(ranks), str(script)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KCOORD_", "TRITON_"))}
    path = os.pathsep.join(filter(None, (str(_ROOT), str(_ROOT / "launch"), os.environ.get("PYTHONPATH"))))
    variables = {**kept, "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}
    variables["LAUNCHED"] = str(time.time())
    return figures("first_step", [*command, str(kernels), str(offset)], variables, timeout=600)
