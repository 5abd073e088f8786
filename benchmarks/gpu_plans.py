"""Whole jobs on real GPUs, one after the other: each under a launcher, with a cache."""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.result import Result, figures

STOCK, OURS = ["-m", "torch.distributed.run"], ["-m", "kcoord_launch.torchrun"]
COLUMNS = ["job", "compile phase s", "compiles", "loads", "ratio to a shared cache", "whole job s"]
SHARED = "one shared TRITON_CACHE_DIR, cold"
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Plan:
    """A run of a job, `mode` of `gpu_job`.

    `cache`: a directory's name; a plan that names an earlier one's is warm. `recorded`: the `cache` whose profiles it finds, and
    nothing else.
    """

    name: str
    launcher: list[str]
    cache: str
    mode: str = "together"
    recorded: str = ""
    more: dict[str, str] = field(default_factory=dict)


def gpus(name: str, ranks: int) -> int:
    """The number of ranks: `ranks`, or one a GPU."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        raise SystemExit(f"benchmark {name}: this machine has no GPU")
    return ranks or count


def measure(result: Result, job: Path, plans: list[Plan], ranks: int, root: Path) -> None:
    """Add a row for each plan."""
    found = {plan.name: _once(job, plan, ranks, root) for plan in plans}
    shared = found[SHARED]["wall"]
    for name, each in found.items():
        cells = [f"{each['wall']:.2f}", str(each["compiles"]), str(each["loads"]), f"{each['wall'] / shared:.2f}"]
        result.rows.append([name, *cells, f"{each['whole']:.1f}"])
    result.notes.append(
        "one run of each, in this order; compile phase: seconds of the slowest rank from barrier to barrier"
    )
    result.notes.append(
        "whole job: seconds from the launch until rank 0 has the figures; compiles of the pool are not among compiles"
    )


def _once(job: Path, plan: Plan, ranks: int, root: Path) -> dict[str, Any]:
    command = [sys.executable, *plan.launcher, "--standalone", "--nproc-per-node", str(ranks)]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KCOORD_", "TRITON_"))}
    path = os.pathsep.join(filter(None, (str(_ROOT), str(_ROOT / "launch"), os.environ.get("PYTHONPATH"))))
    variables = {**kept, "PYTHONPATH": path, "TRITON_DEFAULT_FP_FUSION": "1", "OMP_NUM_THREADS": "1", **plan.more}
    command += [str(job), "--mode", plan.mode]
    variables["TRITON_CACHE_DIR" if plan.launcher is STOCK else "KCOORD_LOCAL_DIR"] = str(root / plan.cache)
    if plan.recorded:
        shutil.copytree(root / plan.recorded / "profiles", root / plan.cache / "profiles")
        (root / plan.cache).chmod(0o700)
    variables["LAUNCHED"] = str(time.time())
    print(f"{plan.name} …", file=sys.stderr, flush=True)
    found = figures(job.stem, command, variables, timeout=400)
    print(f"{found}", file=sys.stderr, flush=True)
    return found
