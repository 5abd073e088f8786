"""``kcoord-torchrun``: torchrun, with kcoord's agent beside it. It takes all arguments of torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kcoord.errors import SettingsError
from kcoord.profiles.automatic import of_module, of_script
from kcoord.settings import FIELDS, unknown_variables, variable
from kcoord_launch.checks import checked_settings
from kcoord_launch.console import say
from kcoord_launch.environment import applied, job_name
from kcoord_launch.pool import most_nodes, pool_beside, ranks_of_node
from kcoord_launch.supervise import supervised

_FLAGS = [f.name for f in FIELDS if f.name not in ("disable", "spawn", "signing_key")]


def main(argv: list[str] | None = None) -> int:
    """Run torchrun with `argv`. Returns torchrun's exit code, or 2 if a setting of kcoord cannot be used."""
    try:
        from torch.distributed import run as torchrun
    except ImportError as error:
        say(f"kcoord-torchrun needs torch ({error}): pip install 'kcoord[torch]'")
        return 2
    parser = torchrun.get_args_parser()
    _add_flags(parser)
    args = parser.parse_args(argv)
    for line in unknown_variables():
        say(line)
    flags = {name: getattr(args, f"kcoord_{name}") for name in _FLAGS}
    try:
        settings = checked_settings(flags, "--kcoord-")
    except SettingsError as error:
        say(str(error))
        return 2
    if settings.disable:
        _launch(torchrun, args)
        return 0
    given = argparse.Namespace(**vars(args))
    if settings.profile is None:
        settings = replace(settings, profile=_profile(args))
    # another interpreter may lack kcoord; if it has kcoord, the environment hooks its compilers
    if not args.no_python and not args.run_path and "PYTHON_EXEC" not in os.environ:
        _through_boot(args)
    with (
        supervised(settings, job_name(settings, args.rdzv_id)) as environment,
        applied(environment),
        pool_beside(given),
    ):
        _launch(torchrun, args)
    return 0


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "kcoord",
        "Each flag is also an environment variable, KCOORD_…; KCOORD_DISABLE=1 turns everything off.",
    )
    for spec in FIELDS:
        if spec.name in _FLAGS:
            flag = f"--kcoord-{spec.name.replace('_', '-')}"
            group.add_argument(flag, metavar=spec.metadata["unit"].upper(), help=f"{spec.metadata['doc']} "
                               f"({variable(spec.name)})".replace("%", "%%"))  # fmt: skip


def _profile(args: Any) -> str:
    """The name of the job's profile, by what it runs."""
    ranks = ranks_of_node(args) * most_nodes(args)
    return (of_module if args.module else of_script)(args.training_script, ranks)


def _through_boot(args: Any) -> None:
    kind = "-m" if args.module else "-"
    args.training_script_args = [kind, args.training_script, *args.training_script_args]
    args.module, args.training_script = False, str(Path(__file__).with_name("boot.py"))


def _launch(torchrun: Any, args: Any) -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    record(torchrun.run)(args)


if __name__ == "__main__":
    sys.exit(main())
