"""``kcoord warmup``: compile a recorded profile before there is a job, by several processes together, on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from typing import Any

import click
from rich.console import Console

from kcoord.cli.options import ALL, json_flag, print_json, settings_flags
from kcoord.errors import KcoordError
from kcoord.keys.device import GPUTarget
from kcoord.profiles.parts import load_profile
from kcoord.settings import Settings, variable
from kcoord.telemetry.progress import Look, shown
from kcoord.warmup.recorded import readable


@click.command("warmup")
@click.argument("name")
@click.option("--target", "targets", multiple=True, help="Compile for this GPU (cuda:90, hip:gfx942) instead of the recorded "
              "ones; may be repeated. No GPU is needed.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1), help="Processes that compile. Default: one for each core.")
@json_flag
@settings_flags(*ALL)
def command(name: str, targets: tuple[str, ...], workers: int | None, as_json: bool, **flags: str | None) -> None:
    """Compile what a job recorded as profile NAME (kcoord-torchrun --kcoord-profile NAME), before it starts again.

    Kernels go to the store, or stay on this node if there is none. One that cannot be compiled is named and skipped.
    """
    settings = Settings.from_environ(**flags)
    for target in targets:
        try:
            GPUTarget.parse(target)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--target") from None
    recipes = load_profile(readable(settings, name), name)
    seconds = [r.seconds for r in recipes for _ in targets or [r.target]]
    count = min(workers or len(os.sched_getaffinity(0)), len(seconds))
    environment = {**os.environ, **{variable(n): v for n, v in flags.items() if v is not None}}
    environment.pop(variable("profile"), None)  # a warm-up records nothing
    begun = time.perf_counter()
    workers_ = [
        _Worker([name, *targets], {**environment, "RANK": str(n), "WORLD_SIZE": str(count)}) for n in range(count)
    ]
    console = Console(stderr=True, highlight=False)
    try:
        with shown(f"warm-up {name}", seconds, count, lambda: _look(workers_)) if not as_json else nullcontext():
            for worker in workers_:
                worker.join()
    finally:
        for worker in workers_:
            worker.stop()
    broken = [w.error for w in workers_ if w.report is None]
    if broken:
        said = broken[0].strip().splitlines()[-1:] or ["it said nothing"]
        raise KcoordError(f"{len(broken)} of {count} processes ended early: {said[0]}")
    summary = _summary([w.report for w in workers_ if w.report is not None], time.perf_counter() - begun)
    if as_json:
        print_json(summary)
        return
    failed = summary["failed"]
    for item in failed:
        console.print(f"skipped {item['name']}: {item['reason']}", markup=False)
    click.echo(
        f"{summary['keys']} keys: {summary['compiled']} compiled, {summary['loaded']} were there, {len(failed)} skipped, "
        f"in {summary['seconds']:.1f} s by {count} processes"
    )


def _look(workers: list[_Worker]) -> Look:
    return Look(max(w.done for w in workers), sum(w.compiled for w in workers))


class _Worker(threading.Thread):
    """One process, and what it says."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self.done = self.compiled = 0
        self.report: dict[str, Any] | None = None
        self.error = ""
        command = [sys.executable, "-m", "kcoord.warmup", *arguments]
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._errors = threading.Thread(target=self._read_errors, daemon=True)
        self._errors.start()
        self.start()

    def stop(self) -> None:
        """End the process if it is still there: this one was interrupted."""
        if self._process.poll() is None:
            self._process.terminate()
        self.join()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self.error = self._process.stderr.read()

    def run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = _parsed(line)
            if said is not None:
                self.done, self.compiled = said.get("done", self.done), said.get("compiled", self.compiled)
                self.report = said.get("report", self.report)
        self._process.wait()
        self._errors.join()


def _parsed(line: str) -> dict[str, Any] | None:
    """What a worker says; None for what compilers and modules print."""
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) and said.keys() <= {"done", "compiled", "report"} else None


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
