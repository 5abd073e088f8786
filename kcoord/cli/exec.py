"""``kcoord exec -- COMMAND``: any command with kcoord's agent beside it."""

from __future__ import annotations

import sys

import click

from kcoord.cli.options import ALL, settings_flags


@click.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--record",
    metavar="NAME",
    help="Record what is compiled as profile NAME, for `kcoord warmup NAME`: the same as --profile.",
)
@settings_flags(*ALL)
@click.argument("arguments", metavar="-- COMMAND [ARGS]…", nargs=-1, required=True, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...], record: str | None, **flags: str | None) -> None:
    """Run COMMAND (python, torchrun, accelerate, …) with an agent on this node, and every compiler below it hooked.

    With srun or mpirun it is what *they* run: srun kcoord exec -- python train.py.

    Signals go on to COMMAND, and its exit code is this one's. A summary is printed at the end.
    """
    from kcoord_launch.exec import run
    from kcoord_launch.supervise import checked_settings

    if record is not None:
        flags["profile"] = record
    sys.exit(run(checked_settings(flags), list(arguments)))
