"""``kcoord cc -- COMPILER``: a compiler launcher, as ccache is one."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

import click

from kcoord.backends.cc.launcher import run
from kcoord.cli.output import echo


@click.command("cc", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("line", metavar="-- COMPILER [ARGS]…", nargs=-1, required=True, type=click.UNPROCESSED)
def command(line: tuple[str, ...]) -> None:
    """Run COMPILER (g++, clang, nvcc, hipcc), or take its outputs from a rank that ran it.

    CXX="kcoord cc -- g++", CMAKE_CUDA_COMPILER_LAUNCHER="kcoord;cc;--", or a script for what takes a path (DeepGEMM's
    DG_JIT_NVCC_COMPILER): exec kcoord cc -- nvcc "$@".

    A command that compiles one source is shared; links, preprocessing, and flags that write further files run as they are.
    """
    signal.signal(signal.SIGTERM, _end)
    try:
        sys.exit(run(line))
    except FileNotFoundError as error:
        echo(f"kcoord: {error.filename or line[0]}: no such program; put the compiler after --", err=True)
        sys.exit(127)
    except OSError as error:
        echo(f"kcoord: {line[0]}: {error.strerror}", err=True)
        sys.exit(126)


def _end(number: int, _: object) -> None:
    """End the compiler, too, which may have begun this moment. An agent that this process has started is in another group."""
    import psutil  # a hit needs none of it

    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):
            if os.getpgid(each.pid) == os.getpgrp():
                each.kill()
    sys.exit(128 + number)
