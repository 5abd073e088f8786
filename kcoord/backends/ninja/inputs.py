"""The inputs of a ninja file's build."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path

from kcoord.keys.environment import TOOLCHAIN_VARIABLES, Environment
from kcoord.keys.tools import commands
from kcoord.keys.tools.commands import Inputs

_environment = Environment(TOOLCHAIN_VARIABLES)


def inputs_of(file: Path, directory: Path, places: Iterable[Path], local_dir: Path) -> tuple[Inputs, str]:
    """Of the ninja `file`, which is run in `directory`, and the output that it makes last. `places` are in no key.

    Raises what `kcoord.keys.tools.commands.inputs_of` raises, OSError if ninja is missing, and ValueError if nothing is built.
    """
    listed = commands.output_of(["ninja", "-C", str(directory), "-f", str(file), "-t", "compdb"])
    edges = [edge for edge in json.loads(listed[listed.index("[") :]) if edge["file"]]
    if not edges:
        raise ValueError("the file builds nothing")
    built = [shlex.split(edge["command"]) for edge in edges]
    sources = sorted({edge["file"] for edge in edges if not edge["file"].endswith(".o")})
    names = sorted(map(str, places), key=len, reverse=True)
    inputs = commands.inputs_of(built, sources, directory, names, local_dir, _environment.token())
    return inputs, str(edges[-1]["output"])
