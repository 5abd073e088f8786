"""``kcoord cc -- COMPILER``: a compiler launcher, as ccache is one."""

from __future__ import annotations

import signal
import sys

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
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # a compiler that runs ends, too
    try:
        sys.exit(run(line))
    except FileNotFoundError as error:
        echo(f"kcoord: {error.filename or line[0]}: no such program; put the compiler after --", err=True)
        sys.exit(127)
    except OSError as error:
        echo(f"kcoord: {line[0]}: {error.strerror}", err=True)
        sys.exit(126)
