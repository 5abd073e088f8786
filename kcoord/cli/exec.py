"""``kcoord exec -- COMMAND``: any command with kcoord's agent beside it."""

from __future__ import annotations

import sys

import click

from kcoord.cli.options import ALL, settings_flags
from kcoord_launch.checks import checked_settings
from kcoord_launch.exec import run


@click.command("exec", context_settings={"allow_interspersed_args": False})
@settings_flags(*ALL)
@click.argument("arguments", metavar="-- COMMAND [ARGS]…", nargs=-1, required=True, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...], **flags: str | None) -> None:
    """Run COMMAND (python, torchrun, accelerate, …) with an agent on this node, and hook the compilers in all its processes.

    Put it after srun or mpirun: srun kcoord exec -- python train.py. COMMAND gets the signals, and its exit code is this one's.
    """
    sys.exit(run(checked_settings(flags), list(arguments)))
