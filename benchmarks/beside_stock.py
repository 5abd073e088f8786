"""What a job takes beside the same job without kcoord: wall and CPU seconds, processes, memory, disk. In one run.

JOBS=TEXT runs the jobs whose names hold TEXT; RUNS=N runs each so often.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.result import Result

_ROOT = Path(__file__).parents[1]
_STOCK, _OURS = ["-m", "torch.distributed.run"], ["-m", "kcoord_launch.torchrun"]
_RANKS, _ROUNDS = 4, int(os.environ.get("RUNS", "3"))
_JOBS = {
    "no kernels": [str(Path(__file__).with_name("beside_stock_job.py"))],
    "20 Triton kernels, cross-compiled": [str(_ROOT / "examples" / "train_ddp.py")],
    "torch.compile, 1 block": [str(Path(__file__).with_name("torch_compile_job.py")), "--layers", "1"],
}
_ASKED = os.environ.get("JOBS", "")
_EVERY = 0.1  # seconds between two looks at a job's processes
_SET_CHILD_SUBREAPER = 36  # prctl(2): agents that leave their parent become children of this process


@dataclass
class Taken:
    """What one job took: seconds, processes at once, bytes."""

    wall: float = 0.0
    cpu: float = 0.0
    processes: int = 0
    memory: int = 0
    disk: int = 0


def run() -> Result:
    """Each job cold and warm, stock and kcoord in turn; a home and a temporary directory of its own for each."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    result = Result(
        f"A job of {_RANKS} ranks, beside the same job without kcoord",
        [
            "job",
            "cache",
            "wall s: stock, kcoord",
            "ratio",
            "CPU s",
            "ratio",
            "processes",
            "PSS MB",
            "more MB",
            "disk MB",
        ],
    )
    for name, job in ((name, job) for name, job in _JOBS.items() if _ASKED in name):
        found: dict[tuple[str, str], list[Taken]] = {}
        for number in range(_ROUNDS):
            for kind, launcher in (("stock", _STOCK), ("kcoord", _OURS)):
                with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as home:
                    for cache in ("cold", "warm"):
                        taken = _once(launcher, job, Path(home))
                        found.setdefault((cache, kind), []).append(taken)
                        print(
                            f"  {name}, {kind}, {cache}, {number + 1} of {_ROUNDS}: {taken}",
                            file=sys.stderr,
                            flush=True,
                        )
        for cache in ("cold", "warm"):
            result.rows.append([name, cache, *_cells(found[cache, "stock"], found[cache, "kcoord"])])
    result.notes += [
        f"medians of {_ROUNDS} runs of each, in turn; stock, then kcoord; from the launch until the last process is gone",
        "processes and PSS (memory, shared pages divided by those that share them): of launcher, ranks, workers and agent"
        f" together, the most of looks {_EVERY} s apart",
        "disk: all that is in the job's home and temporary directory afterwards",
        "kcoord as it is installed, with no setting: no store, no Redis",
    ]
    return result


def _cells(stock: list[Taken], ours: list[Taken]) -> list[str]:
    def both(name: str, form: str, scale: float = 1.0) -> tuple[str, float, float]:
        a, b = (statistics.median(getattr(each, name) for each in runs) / scale for runs in (stock, ours))
        return f"{a:{form}}, {b:{form}}", a, b

    wall, cpu = both("wall", ".1f"), both("cpu", ".1f")
    memory, disk = both("memory", ".0f", 1e6), both("disk", ".1f", 1e6)
    processes = both("processes", ".0f")
    ratios = [f"{b / a:.2f}" for _, a, b in (wall, cpu)]
    return [wall[0], ratios[0], cpu[0], ratios[1], processes[0], memory[0], f"{memory[2] - memory[1]:+.0f}", disk[0]]


def _once(launcher: list[str], job: list[str], home: Path) -> Taken:
    command = [sys.executable, *launcher, "--standalone", "--nproc-per-node", str(_RANKS), *job]
    temporary = home / "tmp"
    temporary.mkdir(exist_ok=True)
    foreign = ("KCOORD_", "TRITON_", "TORCHINDUCTOR_", "PET_", "XDG_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    variables |= {"HOME": str(home), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    taken, ended = Taken(), threading.Event()
    watch = threading.Thread(target=_watch, args=(taken, ended))
    before, begun = os.times(), time.perf_counter()
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, cwd=_ROOT)
        watch.start()
        code = process.wait()
        _await_others()
    taken.wall, after = time.perf_counter() - begun, os.times()
    ended.set()
    watch.join()
    if code:
        raise SystemExit(f"benchmark beside_stock: {' '.join(command)} failed:\n{(home / 'log').read_text()[-2000:]}")
    taken.cpu = after.children_user + after.children_system - before.children_user - before.children_system
    taken.disk = sum(path.lstat().st_blocks * 512 for path in home.rglob("*") if path != home / "log")
    return taken


def _await_others() -> None:
    """Processes that outlive their launcher are children of this one now."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _watch(taken: Taken, ended: threading.Event) -> None:
    while not ended.wait(_EVERY):
        sizes = list(_sizes())
        taken.processes, taken.memory = max(taken.processes, len(sizes)), max(taken.memory, sum(sizes))


def _sizes() -> Iterator[int]:
    """PSS in bytes of each process below this one."""
    for process in psutil.Process().children(recursive=True):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        yield from (int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
