"""Jobs whose workers are started by a library: each kernel is compiled once, and nothing is left behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.support.command import KCOORD
from tests.support.sandbox import PROGRAMS, Sandbox, eventually

EXEC = (*KCOORD, "exec", "--")
KERNELS, WORKERS = 3, 2  # of `PROGRAMS / "worker.py"`
CODE = 7


def reports_in(sandbox: Sandbox) -> Path:
    place = sandbox.root / "reports"
    place.mkdir(exist_ok=True)
    return place


def of_job(sandbox: Sandbox, program: str, way: str, *more: str) -> list[str]:
    """The command of a program that starts workers one way, and then ends with exit code `CODE`."""
    return [sys.executable, *map(str, (PROGRAMS / program, way, reports_in(sandbox), CODE)), *more]


def below_exec(sandbox: Sandbox, program: str, way: str, **more: str | None) -> subprocess.CompletedProcess[str]:
    """`kcoord exec` of that command."""
    return sandbox.run(*EXEC, *of_job(sandbox, program, way), timeout=240, **more)


def check(sandbox: Sandbox, done: subprocess.CompletedProcess[str], *, summary: bool = True) -> None:
    """The job ended with `CODE`, its workers compiled each kernel once, and nothing is left.

    `summary`: `kcoord exec` counts the same. It may miss loads of the last second of a worker that its library killed.
    """
    assert done.returncode == CODE, done.stdout + done.stderr
    reports = [json.loads(path.read_text()) for path in reports_in(sandbox).glob("*.json")]
    assert len(reports) == WORKERS, done.stdout + done.stderr
    compiled = Counter(kernel for report in reports for kernel in report["compiled"])
    assert sorted(compiled.values()) == [1] * KERNELS, done.stdout + done.stderr
    assert all(set(report["compiled"] + report["loaded"]) == set(compiled) for report in reports)
    assert all(report["cubins"] == reports[0]["cubins"] for report in reports)
    if summary:
        told = re.search(rf"{KERNELS} kernels: {KERNELS} compiled, (\d+) loaded", done.stderr)
        assert told, done.stderr
        assert int(told[1]) <= KERNELS * (WORKERS - 1), done.stderr
    eventually(lambda: not sandbox.processes(), what="nothing of the job is left")
    assert not list(sandbox.local.glob("*.sock"))
