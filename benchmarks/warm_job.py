"""500 warm kernels in each of 4 processes: CPU time and system calls, with Triton's own cache and with kcoord's local tier."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.result import Result
from benchmarks.warm_hit import BEGINNING, caches

_KERNELS, _PROCESSES, _ROUNDS = 500, 4, 3
_FEW = 100
_SETTLED = 3.0  # seconds after which a file's identity shows each change

_PROGRAM = f"""{BEGINNING}
kernels.build_scale(2)
before = time.process_time()
count = int(sys.argv[1])
for n in range(count):
    kernels.build_scale(n + 3)
each = (time.process_time() - before) / count
print(json.dumps([each, resource.getrusage(resource.RUSAGE_SELF).ru_utime]))
"""


def run() -> Result:
    title = f"{_KERNELS} warm kernels × {_PROCESSES} processes on one node"
    columns = [
        "cache",
        "user CPU of a process s",
        "ratio",
        "CPU per kernel µs",
        "ratio",
        "system calls per kernel",
    ]
    result = Result(title, columns)
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as directory:
        stock, ours = caches(directory)
        strict = ours | {"KCOORD_TRUST": "require", "KCOORD_SIGNING_KEY": f"k:{'0' * 64}"}
        kinds: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
            "Triton": (stock, ()),
            "kcoord-torchrun": (ours, ("installed",)),
            "kcoord by environment": (ours, ()),
            "kcoord-torchrun, every byte read": (strict, ("installed",)),
        }
        for environment in (stock, ours):
            _together(environment, (), 1)  # cold
        time.sleep(_SETTLED)
        _together(
            ours, ("installed",), 1
        )  # warm once: it lists what it has verified, and keeps the launcher's byte code
        runs: dict[str, list[list[float]]] = {name: [] for name in kinds}
        for _ in range(_ROUNDS):
            for name, (environment, arguments) in kinds.items():
                runs[name] += _together(environment, arguments, _PROCESSES)
        calls = {name: _calls(*kind, f"{directory}/calls") for name, kind in kinds.items()}
    medians = {name: [statistics.median(column) for column in zip(*r, strict=True)] for name, r in runs.items()}
    for name, (each, whole) in medians.items():
        of_stock = medians["Triton"]
        result.rows.append([
            name, f"{whole:.2f}", f"{whole / of_stock[1]:.2f}", f"{each * 1e6:.0f}", f"{each / of_stock[0]:.2f}", calls[name],
        ])  # fmt: skip
    result.notes.append(f"medians of {_ROUNDS} rounds of {_PROCESSES} processes side by side, the caches in turn")
    result.notes.append(
        "per kernel: user and system together, which Linux counts exactly, while it divides them by samples; without the first "
        "kernel, which pays for imports and for Triton's hash of itself; kcoord keeps that hash, if it is there before Triton, "
        "as under kcoord-torchrun"
    )
    result.notes.append(f"system calls: strace -c, the difference of {_FEW} and {2 * _FEW} kernels")
    return result


def _together(environment: dict[str, str], arguments: tuple[str, ...], processes: int) -> list[list[float]]:
    command = [sys.executable, "-c", _PROGRAM, str(_KERNELS), *arguments]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    outputs = [process.communicate()[0] for process in started]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def _calls(environment: dict[str, str], arguments: tuple[str, ...], output: str) -> str:
    """The main thread's; the others are of no kernel."""
    if shutil.which("strace") is None:
        return "no strace"
    totals = []
    for count in (_FEW, 2 * _FEW):
        program = [sys.executable, "-c", _PROGRAM, str(count), *arguments]
        strace = ["strace", "-qq", "-c", "-U", "name,calls", "-o", output]
        subprocess.run([*strace, *program], env=environment, capture_output=True, check=True)
        totals.append(int(Path(output).read_text().split()[-1]))
    return f"{(totals[1] - totals[0]) / _FEW:.1f}"
