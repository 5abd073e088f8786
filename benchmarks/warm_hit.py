"""The cost of a warm hit: Triton's own cache and kcoord's local tier, the same kernels, in turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.result import Result

_KERNELS = 60
_ROUNDS = 7

BEGINNING = f"""
import json, resource, sys, time
if "installed" in sys.argv:
    import kcoord; kcoord.install()
sys.path.insert(0, {str(Path(__file__).parents[1] / "tests" / "support" / "programs")!r})
import triton, kernels
"""
_PROGRAM = f"""{BEGINNING}
def seconds(work):
    begun = time.perf_counter(); work(); return time.perf_counter() - begun
each = [seconds(lambda: kernels.build_scale(n + 2)) for n in range({_KERNELS})]
print(json.dumps([each[0], sum(each[1:])]))
"""


def run() -> Result:
    title = f"A warm hit: {_KERNELS} kernels in a new process"
    result = Result(title, ["cache", "first kernel ms", "every other kernel ms", "ratio to stock"])
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as directory:
        stock, ours = caches(directory)
        runs: dict[str, list[tuple[float, float]]] = {"Triton": [], "kcoord by environment": [], "kcoord-torchrun": []}
        # cold, and without byte code
        _once(stock)
        _once(ours)
        _once(ours, "installed")
        for _ in range(_ROUNDS):
            runs["Triton"].append(_once(stock))
            runs["kcoord by environment"].append(_once(ours))
            runs["kcoord-torchrun"].append(_once(ours, "installed"))
    medians = {name: [statistics.median(column) * 1000 for column in zip(*r, strict=True)] for name, r in runs.items()}
    for name, (first, rest) in medians.items():
        each = rest / (_KERNELS - 1)
        ratio = (first + rest) / sum(medians["Triton"])
        result.rows.append([name, f"{first:.0f}", f"{each:.3f}", f"{ratio:.3f}"])
    result.notes.append(
        f"medians of {_ROUNDS} runs of each, in turn; the ratio is that of all {_KERNELS} kernels together"
    )
    result.notes.append(
        "the first kernel pays for imports and for Triton's hash of itself, which kcoord keeps if it is there before Triton, as "
        "under kcoord-torchrun"
    )
    return result


def caches(directory: str) -> tuple[dict[str, str], dict[str, str]]:
    """The environments in which a process uses Triton's own cache, and kcoord's local tier."""
    stock = {**os.environ, "TRITON_CACHE_DIR": f"{directory}/stock", "TRITON_DEFAULT_FP_FUSION": "1"}
    # byte code is kept, as that of installed packages is: else each process would compile kcoord, and Triton not
    stock |= {"PYTHONPYCACHEPREFIX": f"{directory}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}
    return stock, {
        **stock,
        "TRITON_CACHE_DIR": f"{directory}/local/triton",
        "KCOORD_LOCAL_DIR": f"{directory}/local",
        "KCOORD_IDLE_TIMEOUT": "2",
        "TRITON_CACHE_MANAGER": "kcoord.backends.triton.cache_manager:TritonCacheManager",
    }


def _once(environment: dict[str, str], *arguments: str) -> tuple[float, float]:
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, rest = json.loads(done.stdout.splitlines()[-1])
    return first, rest
