"""The cost of a call's live key, beside a plain dictionary's look-up and Triton's own key of a launch.

The function has six tensors and a scalar for arguments and reads ten globals. Triton's figure is its launch path up to the
launch (`JITFunction.run` with ``warmup=True``), of a kernel with such arguments; with kcoord the kernel's inputs are watched.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.result import Result

_PROCESSES = 5

_PROGRAM = '''
import json, os, sys, time, timeit, types, warnings
warnings.simplefilter("ignore")
import kcoord
kcoord.install()
import torch, triton
import benchmarks.live_key_kernels as subject
from collections import defaultdict

tensors = [torch.empty(64, 64, device=subject.DEVICE) for _ in range(6)]

def first(function):
    begun = time.perf_counter(); function(); return time.perf_counter() - begun

def best(functions, number, rounds=25):
    """Microseconds of the fastest round of each, measured in turn: other processes only make a round slower."""
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(timeit.timeit(function, number=number) / number)
    return {name: min(t) * 1e6 for name, t in times.items()}

found = {"first": first(lambda: subject.build.key(*tensors, 128)) * 1e6}
table = {("a", n): n for n in range(1000)}
key = ("a", 500)
found |= best({"dict": lambda: table[key], "key": lambda: subject.build.key(*tensors, 128)}, 5000)
subject.make_driver()
launch = lambda: subject.kernel.run(*tensors, 128, 3, BLOCK=128, FACTOR=2, grid=(1,), warmup=WARMUP)
WARMUP = True
launch()
kernels = subject.kernel.device_caches
plain = defaultdict(kernels.default_factory, kernels)

def both(name, function, number, rounds):
    """As `best`, with kernels that kcoord watches and with those of Triton alone."""
    times = {"watched": [], "plain": []}
    for _ in range(rounds):
        for mode, caches in (("watched", kernels), ("plain", plain)):
            subject.kernel.device_caches = caches
            times[mode].append(timeit.timeit(function, number=number) / number)
            torch.cuda.is_available() and torch.cuda.synchronize()
    return {f"{mode} {name}": min(t) * 1e6 for mode, t in times.items()}

found |= both("run", launch, 2000, 60)
if torch.cuda.is_available():
    WARMUP = False
    found |= both("launch", launch, 100, 200)
print(json.dumps(found))
'''


_FILES = 2000
_LARGE = """
import json, sys, time
import kcoord, large
begun = time.perf_counter()
large.build.key(1)
print(json.dumps({"files": (time.perf_counter() - begun) * 1e6}))
"""


def _write_project(root: Path) -> None:
    """A function that reaches `_FILES` modules of 60 functions each."""
    body = "".join(f"def g{k}(x):\n    # a comment\n    return [x * {k} for _ in range(10)]\n" for k in range(60))
    (root / "parts").mkdir()
    (root / "parts" / "__init__.py").touch()
    for n in range(_FILES):
        imports = "".join(f"from parts.m{m} import f{m}\n" for m in (2 * n + 1, 2 * n + 2) if m < _FILES)
        (root / "parts" / f"m{n}.py").write_text(f"import os, sys\n{imports}def f{n}(x): return x + {n}\n{body}")
    (root / "large.py").write_text(
        "import kcoord\nfrom parts.m0 import f0\n@kcoord.compile_once(scope=kcoord.Scope.TARGET)\n"
        "def build(x, *, staging): return f0(x)\n"
    )


def _first_of_a_large_project(environment: dict[str, str], root: Path) -> float:
    _write_project(root)
    time.sleep(3)  # files that are younger than the process are compiled, to see whether their text is what runs
    environment = environment | {"PYTHONPATH": os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", _LARGE]
    runs = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(_PROCESSES)
    ]
    return statistics.median(json.loads(done.stdout)["files"] for done in runs)


def run() -> Result:
    result = Result("The live key of a call", ["what", "µs", "ratio"])
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as directory:
        environment = {**os.environ, "KCOORD_LOCAL_DIR": directory, "KCOORD_IDLE_TIMEOUT": "2"}
        runs = [_once(environment) for _ in range(_PROCESSES)]
        large = _first_of_a_large_project(environment, Path(directory))
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    rows = [
        ("a look-up in a dictionary", "dict", "dict"),
        ("kcoord: live key of a call, nothing changed", "key", "dict"),
        ("kcoord: the first call's key", "first", "key"),
        ("Triton: JITFunction.run up to the launch", "plain run", "plain run"),
        ("the same, watched by kcoord", "watched run", "plain run"),
        ("Triton: JITFunction.run with the launch", "plain launch", "plain launch"),
        ("the same, watched by kcoord", "watched launch", "plain launch"),
    ]
    for title, name, reference in rows:
        if name in medians:
            ratio = medians[name] / medians[reference]
            result.rows.append([title, f"{medians[name]:.2f}", f"{ratio:.3f}" if ratio < 2 else f"{ratio:.0f}"])
    result.rows.insert(
        3, [f"the same of a function that reaches {_FILES} files", f"{large:.2f}", f"{large / medians['key']:.0f}"]
    )
    result.notes.append(
        f"medians of {_PROCESSES} processes; in each the fastest of many rounds, with and without kcoord in turn"
    )
    result.notes.append("ratios: to the dictionary, to the warm key, and to Triton without kcoord")
    result.notes.append("6 tensors and a scalar; the function reads 10 globals, the kernel 2 values and a helper")
    return result


def _once(environment: dict[str, str]) -> dict[str, float]:
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
