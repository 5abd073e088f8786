"""flash-linear-attention's layers, whose kernels are tuned as they first run, on real GPUs, without kcoord and with it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from benchmarks.gpu_plans import COLUMNS, OURS, SHARED, STOCK, Plan, gpus, measure
from benchmarks.result import Result

_JOB = Path(__file__).with_name("linear_attention_job.py")


def run(ranks: int = 0) -> Result:
    """Needs GPUs, flash-linear-attention, and PyTorch. `ranks`: 0 is one a GPU. ``LAYERS``: see the job."""
    ranks = gpus("linear_attention", ranks)
    layers = os.environ.get("LAYERS", "six kinds").replace(",", ", ")
    result = Result(f"First step of flash-linear-attention ({layers}) on {ranks} ranks", COLUMNS)
    plans = [
        Plan("kcoord-torchrun, first run ever", OURS, "first"),
        Plan("kcoord-torchrun, warm", OURS, "first"),
        Plan("kcoord-torchrun, cold, run before", OURS, "pool", recorded="first"),
        Plan(SHARED, STOCK, "shared"),
        Plan("shared, warm", STOCK, "shared"),
    ]
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as root:
        measure(result, _JOB, plans, ranks, Path(root))
    return result
