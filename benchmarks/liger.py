"""Liger-Kernel's real kernels on real GPUs, cold and warm, without kcoord and with it, in one run."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.result import Result, figures

_JOB = Path(__file__).with_name("liger_job.py")
_STOCK, _OURS = ["-m", "torch.distributed.run"], ["-m", "kcoord_launch.torchrun"]
_EXEC = ["-c", "from kcoord.cli import main; main()", "exec", "--", sys.executable, *_STOCK]


def run() -> Result:
    """Needs GPUs, Liger-Kernel, and PyTorch with NCCL; one rank a GPU."""
    import torch

    ranks = torch.cuda.device_count()
    if not ranks:
        raise SystemExit("benchmark liger: this machine has no GPU")
    result = Result(
        f"Cold start of 80 Liger-Kernel operations (123 kernels) on {ranks} GPUs",
        ["cache", "compile phase s", "compiles", "loads", "ratio to a shared cache", "whole job s"],
    )

    def at(directory: str) -> dict[str, str]:
        return {"KCOORD_LOCAL_DIR": directory}

    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as root:
        plans = [
            ("a private cache per rank, cold", _STOCK, "together", {"TRITON_CACHE_DIR": ""}),
            ("one shared TRITON_CACHE_DIR, cold", _STOCK, "together", {"TRITON_CACHE_DIR": f"{root}/shared"}),
            ("rank 0 first, then the others, cold", _STOCK, "rank0", {"TRITON_CACHE_DIR": f"{root}/rank0"}),
            (
                "kcoord-torchrun, cold, no profile",
                _OURS,
                "together",
                {**at(f"{root}/local"), "KCOORD_PROFILE": "liger"},
            ),
            (
                "kcoord-torchrun, cold, its profile by the pool",
                _OURS,
                "together",
                {**at(f"{root}/pool"), "KCOORD_PROFILE": "liger"},
            ),
            (
                "the same, every key new",
                _OURS,
                "together",
                {**at(f"{root}/new"), "KCOORD_PROFILE": "liger", "TRITON_DEFAULT_FP_FUSION": "0"},
            ),
            ("kcoord-torchrun, cold, its profile shared by the ranks", _OURS, "profile", at(f"{root}/profile")),
            (
                "kcoord exec, cold, its profile by the pool from the first miss on",
                _EXEC,
                "together",
                {**at(f"{root}/ahead"), "KCOORD_PROFILE": "liger"},
            ),
            (
                "kcoord-torchrun, cold, never run, other widths recorded elsewhere",
                _OURS,
                "together",
                {**at(f"{root}/guessed"), "KCOORD_PROFILE": "new", "WIDTHS": "1536,3072,6144,12288"},
            ),
            (
                "torchrun, one shared TRITON_CACHE_DIR, those other widths",
                _STOCK,
                "together",
                {"TRITON_CACHE_DIR": f"{root}/widths", "WIDTHS": "1536,3072,6144,12288"},
            ),
            ("operations split over the ranks by hand, cold", _STOCK, "split", {"TRITON_CACHE_DIR": f"{root}/split"}),
            *[
                (f"{name}, warm, run {n}", launcher, "together", environment)
                for n in (1, 2, 3)
                for name, launcher, environment in (
                    ("shared", _STOCK, {"TRITON_CACHE_DIR": f"{root}/shared"}),
                    ("kcoord-torchrun", _OURS, at(f"{root}/local")),
                )
            ],
        ]
        figures = {}
        for name, launcher, mode, environment in plans:
            if environment.get("KCOORD_LOCAL_DIR", f"{root}/local") != f"{root}/local":  # cold: only the recipes exist
                shutil.copytree(f"{root}/local/profiles", f"{environment['KCOORD_LOCAL_DIR']}/profiles")
            figures[name] = _once(launcher, ranks, mode, environment, root)
    shared = figures["one shared TRITON_CACHE_DIR, cold"]["wall"]
    for name, found in figures.items():
        cells = [f"{found['wall']:.2f}", str(found["compiles"]), str(found["loads"]), f"{found['wall'] / shared:.2f}"]
        cells.append(f"{found['whole']:.1f}")
        result.rows.append([name, *cells])
    result.notes.append("one run of each, in this order; wall seconds of the slowest rank from barrier to barrier")
    result.notes.append(
        "the split by hand is the bound for the cooperative warm-up of a profile, whose time is in the wall"
    )
    return result


def _once(launcher: list[str], ranks: int, mode: str, environment: dict[str, str], root: str) -> dict[str, Any]:
    command = [sys.executable, *launcher, "--standalone", "--nproc-per-node", str(ranks)]
    launched = str(time.time())
    variables = {
        **os.environ,
        "LAUNCHED": launched,
        "TRITON_DEFAULT_FP_FUSION": "1",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    if environment.get("TRITON_CACHE_DIR") == "":  # each rank its own, below a home of its own
        shell = f'TRITON_CACHE_DIR={root}/private$RANK exec {sys.executable} {_JOB} --mode "$0"'
        command += ["--no-python", "bash", "-c", shell, mode]
    else:
        command += [str(_JOB), "--mode", mode]
    return figures("liger", command, variables, timeout=180)
