"""Liger-Kernel's real kernels on real GPUs, cold and warm, without kcoord and with it, in one run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.gpu_plans import COLUMNS, OURS, SHARED, STOCK, Plan, gpus, measure
from benchmarks.result import Result

_JOB = Path(__file__).with_name("liger_job.py")
_OTHER_WIDTHS = {"WIDTHS": "1536,3072,6144,12288"}
_NEW_KEYS = {"TRITON_DEFAULT_FP_FUSION": "0"}
_UNKNOWN = {**_OTHER_WIDTHS, "KCOORD_PROFILE": "new"}


def run(ranks: int = 0) -> Result:
    """Needs GPUs, Liger-Kernel, and PyTorch. `ranks`: 0 is one a GPU."""
    ranks = gpus("liger", ranks)
    result = Result(f"Cold start of 80 Liger-Kernel operations (123 kernels) on {ranks} ranks", COLUMNS)
    plans = [
        Plan(SHARED, STOCK, "shared"),
        Plan("operations split over the ranks by hand, cold", STOCK, "split", "split"),
        Plan("kcoord-torchrun, first run ever", OURS, "first"),
        Plan("kcoord-torchrun, cold, run before", OURS, "pool", recorded="first"),
        Plan("the same, an option of Triton changed: every key is new", OURS, "new", recorded="first", more=_NEW_KEYS),
        Plan(
            "kcoord-torchrun, first run, other widths recorded elsewhere",
            OURS,
            "guessed",
            recorded="first",
            more=_UNKNOWN,
        ),
        Plan("torchrun, one shared TRITON_CACHE_DIR, those other widths", STOCK, "widths", more=_OTHER_WIDTHS),
        Plan("shared, warm", STOCK, "shared"),
        Plan("kcoord-torchrun, warm", OURS, "first"),
    ]
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as root:
        measure(result, _JOB, plans, ranks, Path(root))
    return result
