"""Slurm signals every process of a step: the script gets each signal once, and the agent survives those that are the script's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.command import KCOORD
from tests.support.living import agents_of
from tests.support.sandbox import Sandbox, eventually, finish

HEARS = """
import os, signal, sys
numbers = signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print(os.getpid(), file=open(sys.argv[1], "w"), flush=True)
while True:
    heard = signal.sigwaitinfo(numbers)
    print(signal.Signals(heard.si_signo).name, heard.si_pid, flush=True)
    if heard.si_signo == signal.SIGTERM:
        break
"""
SENT = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM)


def has_handled(pid: int) -> bool:
    """True if no signal waits for the process, and it waits itself: its handlers have run."""
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return not int(fields["ShdPnd"], 16) | int(fields["SigPnd"], 16) and fields["State"].startswith("S")


@contextmanager
def hearing(sandbox: Sandbox, **more: str | None) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A launcher, and the process of its script, which writes down each signal and the process that sent it."""
    up = sandbox.root / "up"
    command = (*KCOORD, "exec", "--", sys.executable, "-c", HEARS, str(up))
    with sandbox.start(*command, SLURM_JOB_ID="7", **more) as job:
        try:
            eventually(lambda: up.exists() and up.read_text())
            yield job, int(up.read_text())
        finally:
            for process in (job, *sandbox.processes()):
                process.kill()


@pytest.mark.parametrize("disabled", [None, "1"], ids=["", "disabled"])
def test_in_a_step_the_script_gets_each_signal_once_and_from_slurm(sandbox: Sandbox, disabled: str | None) -> None:
    with hearing(sandbox, SLURM_STEP_ID="0", KCOORD_DISABLE=disabled) as (job, script):
        for number in SENT:
            job.send_signal(number)
            eventually(lambda: has_handled(job.pid))
            os.kill(script, number)
            assert job.stdout is not None
            assert job.stdout.readline() == f"{number.name} {os.getpid()}\n"
        done = finish(job)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("step", [None, "4294967291"], ids=["no step", "batch script"])
def test_elsewhere_the_script_gets_what_its_launcher_gets(sandbox: Sandbox, step: str | None) -> None:
    """``scancel --batch`` signals the batch script alone."""
    with hearing(sandbox, SLURM_STEP_ID=step) as (job, _):
        assert job.stdout is not None
        for number in SENT:
            job.send_signal(number)
            assert job.stdout.readline() == f"{number.name} {job.pid}\n"
        assert finish(job).returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a process namespace")
def test_a_containers_first_process_forwards_what_the_container_gets(sandbox: Sandbox) -> None:
    """As Docker starts one within a step, and signals that process alone."""
    up = sandbox.root / "up"
    command = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        sys.executable,
        *KCOORD,
        "exec",
        "--",
        sys.executable,
        "-c",
        HEARS,
        up,
    ]
    with subprocess.Popen(command, env=sandbox.env(SLURM_STEP_ID="0"), stdout=subprocess.PIPE, text=True) as job:
        try:
            eventually(lambda: up.exists() and up.read_text())
            (first,) = psutil.Process(job.pid).children()
            first.send_signal(signal.SIGTERM)
            out, _ = job.communicate(timeout=60)
            assert (job.returncode, out) == (0, "SIGTERM 1\n")
        finally:
            job.kill()


def test_a_signal_for_the_script_ends_no_agent(sandbox: Sandbox) -> None:
    with hearing(sandbox, SLURM_STEP_ID="0") as (job, script):
        assert sandbox.run(*KCOORD, "status").returncode == 0
        before = agents_of(sandbox.processes())
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            before[0].send_signal(number)
        assert sandbox.run(*KCOORD, "status").returncode == 0
        assert agents_of(sandbox.processes()) == before
        os.kill(script, signal.SIGTERM)
        assert "restarted" not in finish(job).stderr
