"""``kcoord-torchrun``: torchrun, with kcoord's agent beside it. It takes all arguments of torchrun."""

from __future__ import annotations

import argparse
import difflib
import functools
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NoReturn

import kcoord
from kcoord.errors import SettingsError
from kcoord.packs.automatic import of_module, of_script
from kcoord.settings import FIELDS, unknown_variables, variable
from kcoord_launch.arguments import FLAGS, add_flags, early_arguments
from kcoord_launch.borrowing import borrow
from kcoord_launch.checks import checked_settings
from kcoord_launch.console import say
from kcoord_launch.environment import applied, job_name
from kcoord_launch.interpreter import interpreter_of, is_this_one
from kcoord_launch.pool import most_nodes, pool_beside, ranks_of_node
from kcoord_launch.supervise import supervised

_NEEDS_TORCH = "kcoord-torchrun needs torch: pip install 'kcoord[torch]'"


def main(argv: list[str] | None = None) -> int:
    """Run torchrun with `argv`. Returns torchrun's exit code, or 2 if a setting of kcoord cannot be used."""
    argv = sys.argv[1:] if argv is None else argv
    if find_spec("torch") is None:
        say(_NEEDS_TORCH)
        return 2
    args = early_arguments(argv) or _parsed(argv)
    for line in unknown_variables():
        say(line)
    flags = {name: getattr(args, f"kcoord_{name}") for name in FLAGS}
    try:
        settings = checked_settings(flags, "--kcoord-")
    except SettingsError as error:
        say(str(error))
        return 2
    if settings.disable:
        args = _parsed(argv)
        with applied({variable("disable"): "1"}):
            _launch(args)
        return 0
    borrow(settings)
    if settings.profile is None:
        settings = replace(settings, profile=_profile(args))
    job = job_name(settings, args.rdzv_id)
    with (
        supervised(settings, job, nodes=most_nodes(args), has_kcoord=_has_kcoord(args)) as environment,
        pool_beside(args, environment),
    ):
        args = _parsed(argv)
        with applied(environment):
            _launch(args)
    return 0


def _parsed(argv: list[str]) -> argparse.Namespace:
    """Imports torch; ends this process if `argv` is wrong, or asks for help."""
    try:
        from torch.distributed import run as torchrun
    except ImportError as error:
        say(f"{_NEEDS_TORCH} ({error})")
        sys.exit(2)
    parser = torchrun.get_args_parser()
    add_flags(parser)
    if "--version" not in parser._option_string_actions:
        versions = f"kcoord {kcoord.__version__}, torch {sys.modules['torch'].__version__}"
        parser.add_argument("--version", action="version", version=versions)
    parser.error = functools.partial(_refuse, parser)
    parsed: argparse.Namespace = parser.parse_args(argv)
    return parsed


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Print one line with the nearest known flags, instead of fifty lines of usage, and end."""
    known = [flag for action in parser._actions for flag in action.option_strings]
    wrong = [] if message.startswith("ambiguous") else [word for word in message.split() if word[:1] == "-"]
    near = [each for word in wrong for each in _meant(word.partition("=")[0], known)]
    more = f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""
    say(f"{message}{more} (kcoord-torchrun --help)")
    sys.exit(2)


def _meant(flag: str, known: list[str]) -> list[str]:
    """Flags for which `flag` may be meant: of `kcoord exec`, a setting that is a variable alone, or a slip."""
    if (own := f"--kcoord-{flag.lstrip('-')}") in known:
        return [own]
    name = variable(flag.removeprefix("--kcoord-").replace("-", "_"))
    return (
        [f"{name}="] if name in (variable(spec.name) for spec in FIELDS) else difflib.get_close_matches(flag, known, 1)
    )


def _profile(args: Any) -> str:
    """The name of the job's profile, by what it runs."""
    ranks = ranks_of_node(args) * most_nodes(args)
    return (of_module if args.module else of_script)(args.training_script, ranks)


def _has_kcoord(args: argparse.Namespace) -> bool:
    return not args.no_python or is_this_one(interpreter_of([args.training_script]))


def _launch(args: argparse.Namespace) -> None:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import record

    record(torchrun.run)(args)


if __name__ == "__main__":
    sys.exit(main())
