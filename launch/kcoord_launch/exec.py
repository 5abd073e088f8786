"""``kcoord exec -- COMMAND``: any command, or any other launcher, with kcoord's agent beside it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import replace
from types import FrameType

from kcoord.packs.automatic import of_command
from kcoord.ranks import nodes_of, ranks_of
from kcoord.settings import Settings, variable
from kcoord_launch.borrowing import borrow
from kcoord_launch.console import say
from kcoord_launch.environment import job_name, with_variables
from kcoord_launch.interpreter import has_kcoord, interpreter_of, is_this_one
from kcoord_launch.supervise import supervised

_FIRST_OF_SLURMS_OWN = 0xFFFFFFF0  # numbers of steps that are none of srun's: the batch script, an interactive shell
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def run(settings: Settings, command: list[str]) -> int:
    """Run `command` under an agent; returns its exit code, 128 + n if signal n ended it, 127 if it is not found.

    Forwards signals to the command, but for those that Slurm sends to every process of a step.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited; it would hide a process's exit code
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if settings.disable:
        return _run(command, {**os.environ, variable("disable"): "1"})
    borrow(settings)
    code, why = _fault_of(command[0])
    if code:
        say(f"{command[0]}: {why}")
        return code
    if settings.profile is None:
        # None: each process finds its own
        settings = replace(settings, profile=of_command(command, ranks_of().world or 0))
    interpreter = interpreter_of(command)
    is_ours = is_this_one(interpreter)
    if interpreter and not is_ours and not has_kcoord(interpreter):
        say(
            f"{interpreter} has no kcoord, so its kernels are not shared: pip install kcoord there, or use another Python"
        )
    with supervised(settings, job_name(settings), nodes=nodes_of(), has_kcoord=is_ours) as extra:
        return _run(command, with_variables(extra))


def _fault_of(program: str) -> tuple[int, str]:
    """A shell's exit code for a program that cannot be run, and why it cannot; 0 if it may be."""
    if shutil.which(program):
        return 0, ""
    if shutil.which(program, os.F_OK):
        return 126, f"it is not executable: chmod +x it, or name its interpreter, as in python {program}"
    return 127, "no such program: " + ("give its words without quotes" if " " in program else "check its name and PATH")


def _run(command: list[str], environment: dict[str, str]) -> int:
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that came before the process had started
    in_step = _is_in_step()

    def forward(number: int, frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        # a terminal's Ctrl-C reaches the whole foreground group, so also the command
        elif not in_step and (number != signal.SIGINT or not _shares_terminal()):
            process.send_signal(number)

    # under nohup the command ignores SIGHUP, too
    forwarded = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in forwarded}
    try:
        try:
            # inherited descriptors stay open: MPICH's ranks talk to mpiexec on the descriptor PMI_FD
            process = subprocess.Popen(command, env=environment, close_fds=False)
        except OSError as error:
            say(f"{command[0]}: {error.strerror}")
            return 127 if isinstance(error, FileNotFoundError) else 126
        for number in early:
            process.send_signal(number)
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _is_in_step() -> bool:
    """True in a step of Slurm's, which sends its signals to every process of a step.

    In a container that hides the step's other processes (Docker), the first process alone gets them.
    """
    step = os.environ.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _FIRST_OF_SLURMS_OWN and os.getpid() != 1


def _shares_terminal() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
