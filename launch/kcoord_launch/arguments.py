"""torchrun's arguments, read without torch: in the seconds that its import takes, the agent and the pool start."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import NoReturn

from kcoord.settings import FIELDS, variable

FLAGS = [f.name for f in FIELDS if f.name not in ("disable", "spawn", "signing_key")]
"""The settings that are flags, too."""

_NEEDED = {"nnodes": "1:1", "nproc-per-node": "1", "rdzv-backend": "static", "rdzv-id": "none"}
_OTHERS = (
    "rdzv-endpoint", "rdzv-conf", "max-restarts", "monitor-interval", "start-method", "event-log-handler", "role", "log-dir",
    "local-ranks-filter", "duplicate-stdout-filters", "duplicate-stderr-filters", "master-addr", "master-port", "local-addr",
    "logs-specs", "numa-binding", "signals-to-handle", "shutdown-timeout",
)  # fmt: skip
_NUMBERS: dict[str, type] = {
    "max-restarts": int,
    "monitor-interval": float,
    "master-port": int,
    "shutdown-timeout": int,
}
_SWITCHES = ("no-python", "run-path", "standalone", "virtual-local-rank")


class _Unknown(Exception):
    """An argument is not known here: torchrun's own parser takes over."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Unknown(message)


def early_arguments(argv: Sequence[str]) -> argparse.Namespace | None:
    """The arguments that kcoord needs, under the names of torchrun's own parser; None if one of `argv` is not known here.

    Torch may be newer than this list. Not guaranteed: that torchrun accepts the arguments.
    """
    parser = _Parser(add_help=False)
    for name, default in _NEEDED.items():
        parser.add_argument(*_spelled(name), default=_of_environment(name) or default)
    for name in _OTHERS:
        parser.add_argument(*_spelled(name), type=_NUMBERS.get(name, str))
    parser.add_argument(*_spelled("node-rank"), type=int, default=_of_environment("node-rank") or 0)
    parser.add_argument("-r", "--redirects")
    parser.add_argument("-t", "--tee")
    for names in (("-m", "--module"), *map(_spelled, _SWITCHES)):
        parser.add_argument(*names, action="store_true", default=_of_environment(names[-1].strip("-")) == "1")
    add_flags(parser)
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    try:
        return parser.parse_args(argv)
    except _Unknown:
        return None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add kcoord's own flags."""
    group = parser.add_argument_group(
        "kcoord", "Each flag is also an environment variable, KCOORD_…; KCOORD_DISABLE=1 turns everything off."
    )
    for spec in FIELDS:
        if spec.name in FLAGS:
            flag = f"--kcoord-{spec.name.replace('_', '-')}"
            group.add_argument(flag, metavar=spec.metadata["unit"].upper(), help=f"{spec.metadata['doc']} "
                               f"({variable(spec.name)})".replace("%", "%%"))  # fmt: skip


def _spelled(name: str) -> list[str]:
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")))


def _of_environment(name: str) -> str | None:
    """Torchrun's own variable for an argument."""
    return os.environ.get(f"PET_{name.replace('-', '_').upper()}")
