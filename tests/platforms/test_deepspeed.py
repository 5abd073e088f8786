"""DeepSpeed's launcher, below kcoord and above it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.sandbox import PROGRAMS, Sandbox
from tests.support.workers import CODE, EXEC, check, reports_in

pytest.importorskip("deepspeed", reason="make test-platforms installs DeepSpeed")

LAUNCH = (sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus=2", "--no_local_rank")
PROGRAM = str(PROGRAMS / "failing_rank.py")


def test_one_agent_for_the_launcher(sandbox: Sandbox) -> None:
    check(sandbox, run(sandbox, *EXEC, *LAUNCH, PROGRAM))


def test_one_agent_for_ranks_that_begin_with_kcoord(sandbox: Sandbox) -> None:
    """When a rank fails, the launcher ends every process below it, also the agent; so there may be no summary."""
    done = run(sandbox, *LAUNCH[1:], "--no_python", sys.executable, *EXEC, sys.executable, PROGRAM)
    check(sandbox, done, summary=False)


def run(sandbox: Sandbox, *command: str) -> subprocess.CompletedProcess[str]:
    variables = {"DS_ACCELERATOR": "cpu", "KCOORD_JOB": "of-deepspeed", "HOME": str(sandbox.root)}
    return sandbox.run(*command, str(reports_in(sandbox)), str(CODE), **variables)
