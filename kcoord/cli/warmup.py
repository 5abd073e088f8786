"""``kcoord warmup``: compile a recorded profile before there is a job, in several processes, on any machine."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import click

from kcoord.cli.options import ALL, Parsed, Whole, agent_status, environ_with, json_flag, print_json, settings_flags
from kcoord.cli.output import echo
from kcoord.errors import KcoordError
from kcoord.keys.device import GPUTarget
from kcoord.settings import NO_PROFILE, Settings, variable
from kcoord.telemetry.progress import Look, shown
from kcoord.telemetry.spans import plain_text
from kcoord.warmup.profile_access import recorded
from kcoord.warmup.tasks import distinct
from kcoord_launch.checks import checked_settings
from kcoord_launch.environment import job_name, with_variables
from kcoord_launch.supervise import supervised

_LONGEST_ERROR = 64 << 10  # characters
_LONGEST_LINE = 2000
_STORE_STANDS_STILL = 120.0  # seconds; one that takes nothing for so long is given up
_ASK_AGAIN = 0.1  # seconds


def _target(text: str) -> str:
    GPUTarget.parse(text)
    return text


@click.command("warmup")
@click.argument("name")
@click.option("--target", "targets", multiple=True, type=Parsed("target", _target), help="Compile for this GPU "
              "(cuda:90, hip:gfx942) instead of the recorded ones; may be repeated. No GPU is needed.")  # fmt: skip
@click.option("--workers", type=Whole(1), help="Processes that compile. Default: one for each core.")
@json_flag
@settings_flags(*ALL)
def command(name: str, targets: tuple[str, ...], workers: int | None, as_json: bool, **flags: str | None) -> None:
    """Compile the kernels of profile NAME, which a job recorded (kcoord-torchrun --kcoord-profile NAME), before the next job.

    Start it where the job's modules can be imported: in the directory of its script, or with PYTHONPATH. A kernel that cannot be
    compiled is named and skipped. Exit code 1 if none can be compiled, or if there was no agent to take them.
    """
    settings = checked_settings(flags, is_job=False)
    if settings.disable:
        echo("kcoord: KCOORD_DISABLE is set: nothing is compiled", err=True)
        return
    recipes = distinct(recorded(settings, name), targets)
    seconds = [r.seconds for r in recipes for _ in targets or [r.target]]
    count = min(workers or len(os.sched_getaffinity(0)), len(seconds))
    begun = time.perf_counter()
    processes: list[_Worker] = []
    with _interrupted_by_signals(), supervised(settings, job_name(settings), sums_up=False) as beside:
        if beside.get(variable("disable")) == "1":
            raise KcoordError("there is no agent to take what would be compiled (see above)")
        environment = with_variables(beside, environ_with(flags))
        environment[variable("profile")] = NO_PROFILE  # a warm-up records nothing
        try:
            for rank in range(count):
                ranked = {**environment, "RANK": str(rank), "WORLD_SIZE": str(count)}
                processes.append(_started([name, *targets], ranked))
            with shown(f"warm-up {name}", seconds, count, lambda: _look(processes)) if not as_json else nullcontext():
                for worker in processes:
                    worker.join()
        finally:
            for worker in processes:
                worker.stop()
        left = _uploaded(settings)
    broken = [w.error for w in processes if w.report is None]
    if broken:
        last = broken[0].strip().splitlines()[-1:] or ["without an error message"]
        raise KcoordError(f"{len(broken)} of {count} processes ended early: {last[0]}")
    summary = _summary([w.report for w in processes if w.report is not None], time.perf_counter() - begun)
    failed = summary["failed"]
    known = {f"kcoord: warm-up skips {item['name']}: {item['reason']}" for item in failed}
    for line in dict.fromkeys(line for worker in processes for line in worker.warnings if line not in known):
        echo(line, err=True)
    if as_json:
        print_json(summary)
    else:
        for item in failed:
            echo(plain_text(f"skipped {item['name']}: {item['reason']}", _LONGEST_LINE), err=True)
        echo(
            f"{summary['keys']} keys: {summary['compiled']} compiled, {summary['loaded']} loaded, {len(failed)} skipped, "
            f"in {summary['seconds']:.1f} s by {count} processes"
        )
    if failed and not summary["keys"]:
        raise KcoordError(
            "no key could be compiled: start this where the job's modules can be imported, as in its directory"
        )
    alone = sum(worker.alone for worker in processes)
    if alone and left is None:
        raise KcoordError(f"{alone} of these compiles are not shared: there is no agent (see above)")
    if left:
        raise KcoordError(f"{left} kernels did not get into the store, which takes too long: run this again")


def _uploaded(settings: Settings) -> int | None:
    """Wait until the store has what was compiled; the number of artifacts that it does not take. None: there is no agent."""
    fewest, since = math.inf, time.monotonic()
    while (status := agent_status(settings)) is not None:
        left = int(status["uploads"])
        if left < fewest:
            fewest, since = left, time.monotonic()
        if not left or time.monotonic() > since + _STORE_STANDS_STILL:
            return left
        time.sleep(_ASK_AGAIN)
    return None


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP, unless they are ignored, end the block as SIGINT does, so that it ends its processes."""

    def interrupt(number: int, frame: object) -> None:
        sys.exit(128 + number)

    heard = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _look(processes: list[_Worker]) -> Look:
    return Look(max(w.done for w in processes), sum(w.compiled for w in processes))


def _started(arguments: list[str], environment: dict[str, str]) -> _Worker:
    try:
        return _Worker(arguments, environment)
    except OSError as error:  # a container's limit of processes, say
        raise KcoordError(f"a process cannot be started: {error.strerror}: ask for fewer --workers") from error


def _start_process(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kcoord.warmup", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


class _Worker(threading.Thread):
    """One process, and its output."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self.done = self.compiled = self.alone = 0
        self.report: dict[str, Any] | None = None
        self.error = ""  # the end of its stderr
        self.warnings: list[str] = []  # kcoord's
        self._process = _start_process(arguments, environment)
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        self.start()

    def stop(self) -> None:
        """End the process if it still runs: this one was interrupted."""
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait()  # after an interrupted `join` Python 3.12 and older take the thread for ended
        self.join()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.error = (self.error + line)[-_LONGEST_ERROR:]
            if line.startswith("kcoord: "):
                self.warnings.append(line.rstrip())

    def run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = _parsed(line)
            if message is not None:
                self.done, self.compiled = message.get("done", self.done), message.get("compiled", self.compiled)
                self.alone = message.get("alone", self.alone)
                self.report = message.get("report", self.report)
        self._process.wait()
        self._errors.join()


def _parsed(line: str) -> dict[str, Any] | None:
    """A worker's message; None for a line that a compiler or a module printed."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and message.keys() <= {"done", "compiled", "report", "alone"} else None


def _summary(reports: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    failed = {name: reason for report in reports for name, reason in report["failed"]}
    keys = max(r["compiled"] + r["loaded"] + r["left"] for r in reports)
    compiled = sum(r["compiled"] for r in reports)
    return {
        "keys": keys,
        "compiled": compiled,
        "loaded": max(0, keys - compiled),
        "failed": [{"name": n, "reason": r} for n, r in sorted(failed.items())],
        "seconds": seconds,
        "processes": len(reports),
    }
