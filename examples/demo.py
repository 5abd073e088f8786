"""``make demo``: the same training job under torchrun and under kcoord-torchrun, with a cold and with a warm cache.

Four ranks run ``train_ddp.py`` four times. Every directory is fresh, below ``.demo/``; your own caches are not touched.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(__file__).resolve().parent / "train_ddp.py"
HOME = ROOT / ".demo"
LAUNCHERS = {"torchrun": "torch.distributed.run", "kcoord-torchrun": "kcoord_launch.torchrun"}
TIME_LIMIT = 300.0  # seconds, for one run
TAIL = 40  # lines of a failed run's output


@dataclass(frozen=True)
class Figures:
    """One run of the job: the figures of `train_ddp.py`, and the seconds of the whole command."""

    launcher: str
    cache: str
    kernels: int
    compiles: int
    loads: int
    compile_seconds: float
    job_seconds: float
    loss_first: float
    loss_last: float


class RunFailed(Exception):
    """A run that failed; the message has the reason, and `log` is its output."""

    def __init__(self, message: str, log: Path) -> None:
        super().__init__(message)
        self.log = log


def environment(launcher: str, cache: str) -> dict[str, str]:
    """This process's environment with every cache below `HOME`, and without settings that would change the comparison."""
    foreign = ("KCOORD_", "TRITON_", "TORCHINDUCTOR_", "PET_")
    base = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    base |= {
        "TRITON_HOME": str(HOME / launcher),
        "TORCHINDUCTOR_CACHE_DIR": str(HOME / launcher / "inductor"),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    if launcher == "torchrun":
        return base | {"TRITON_CACHE_DIR": str(HOME / launcher / "triton")}
    return base | {"KCOORD_LOCAL_DIR": str(HOME / launcher / "local"), "KCOORD_JOB": f"demo-{cache}"}


@contextmanager
def own_group(command: list[str], log: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` in a process group of its own, which ends with the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=variables, cwd=HOME, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run(launcher: str, cache: str, options: argparse.Namespace) -> Figures:
    """One run of the job. Raises `RunFailed`."""
    log = HOME / f"{launcher}-{cache}.log"
    command = [sys.executable, "-m", LAUNCHERS[launcher], "--standalone", "--nproc-per-node", str(options.ranks)]
    command += [str(SCRIPT), "--kernels", str(options.kernels), "--steps", str(options.steps)]
    started = time.perf_counter()
    with own_group(command, log, environment(launcher, cache)) as process:
        try:
            code = process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"it was not done after {TIME_LIMIT:.0f} s", log) from None
    seconds = time.perf_counter() - started
    if code != 0:
        raise RunFailed(f"it ended with code {code}", log)
    report = next((line for line in reversed(lines_of(log)) if line.startswith('{"world"')), None)
    if report is None:
        raise RunFailed("it printed no report", log)
    found = json.loads(report)
    return Figures(
        launcher,
        cache,
        kernels=found["kernels"],
        compiles=found["compiled"],
        loads=found["loaded"],
        compile_seconds=found["compile_wall_seconds"],
        job_seconds=round(seconds, 3),
        loss_first=found["loss_first"],
        loss_last=found["loss_last"],
    )


def lines_of(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()


def table(runs: list[Figures]) -> Table:
    shown = Table(title="The same job, four times")
    shown.add_column("launcher", no_wrap=True)
    shown.add_column("cache")
    for heading in ("kernels", "compiles", "loads", "compile phase (s)", "job (s)"):
        shown.add_column(heading, justify="right")
    for r in runs:
        counts = map(str, (r.kernels, r.compiles, r.loads))
        shown.add_row(r.launcher, r.cache, *counts, f"{r.compile_seconds:.1f}", f"{r.job_seconds:.1f}")
    return shown


def verdict(runs: list[Figures]) -> str:
    """The table in one sentence."""
    plain, ours = (next(r for r in runs if (r.launcher, r.cache) == (name, "cold")) for name in LAUNCHERS)
    return (
        f"Cold, kcoord-torchrun compiled {ours.compiles} times for {ours.kernels} kernels where torchrun compiled "
        f"{plain.compiles} times ({plain.compiles / max(ours.compiles, 1):.1f} × as often), and the compile phase took "
        f"{ours.compile_seconds:.1f} s instead of {plain.compile_seconds:.1f} s "
        f"({plain.compile_seconds / max(ours.compile_seconds, 0.001):.1f} ×)."
    )


def report() -> str:
    """The page about the cold run under kcoord; a sentence that says where it is, or why there is none."""
    page = HOME / "report.html"
    command = [sys.executable, "-m", "kcoord", "report", "demo-cold", "--output", str(page)]
    done = subprocess.run(command, env=environment("kcoord-torchrun", "cold"), capture_output=True, text=True)
    if done.returncode:  # kcoord was off, most likely, and has said why
        said = [line for line in lines_of(HOME / "kcoord-torchrun-cold.log") if line.startswith("kcoord: ")]
        return f"There is no report: {(said or [done.stderr.strip()])[0]}"
    return f"The time line of the cold run under kcoord, for a browser: {page.as_uri()}"


def caveat(ranks: int, cores: int) -> str | None:
    """A note on what distorts the seconds on this machine; empty if nothing does."""
    if cores >= ranks:
        return None
    return (
        f"Mind the seconds: {ranks} ranks share {cores} core{'s' if cores > 1 else ''} here, so compiles that are done "
        "twice slow each other down, and the launcher that compiles less looks better than it would with a core per rank. "
        "The counts do not depend on that."
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The same training job under torchrun and under kcoord-torchrun.")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--kernels", type=int, default=20, metavar="N", help="train_ddp.py's; default: %(default)s")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="train_ddp.py's; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and progress to stderr")
    options = parser.parse_args()
    if options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: at least 1")
    return options


def main() -> int:
    options = arguments()
    console = Console(stderr=options.json, highlight=False)
    cores = len(os.sched_getaffinity(0))
    if HOME.exists():
        shutil.rmtree(HOME)
    HOME.mkdir()
    runs: list[Figures] = []
    phases = [(launcher, cache) for launcher in LAUNCHERS for cache in ("cold", "warm")]
    for number, (launcher, cache) in enumerate(phases, 1):
        console.print(f"[{number}/{len(phases)}] {launcher}, {options.ranks} ranks, {cache} cache …", markup=False)
        try:
            runs.append(run(launcher, cache, options))
        except RunFailed as failure:
            console.print(f"failed: {failure}; the end of {failure.log}:", style="bold red")
            for line in lines_of(failure.log)[-TAIL:]:
                console.print(f"    {line}", markup=False, soft_wrap=True)
            return 1
        last = runs[-1]
        console.print(
            f"      {last.compiles} compiles, {last.loads} loads, loss {last.loss_first:.2f} → {last.loss_last:.2f}, "
            f"{last.job_seconds:.1f} s"
        )
    warning = caveat(options.ranks, cores)
    if options.json:
        found = {"ranks": options.ranks, "cores": cores, "caveat": warning, "runs": [asdict(r) for r in runs]}
        print(json.dumps(found, indent=2, ensure_ascii=False))
        return 0
    console.print()
    console.print(table(runs))
    console.print(verdict(runs))
    if warning:
        console.print(warning, style="yellow")
    console.print(report(), soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
