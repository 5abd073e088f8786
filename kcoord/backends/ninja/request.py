"""A library that ninja is to build, and the inputs of its build."""

from __future__ import annotations

import itertools
import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.backends.toolchains import SharedHeaderLists
from kcoord.files.atomic import replace_file
from kcoord.keys.tools import commands
from kcoord.keys.tools.commands import Inputs
from kcoord.rank.connect import connect

_DIRECTORIES = ("-I", "-L", "-isystem", "-iquote", "-idirafter")
_LIBRARIES = (".a", ".o", ".so")


@dataclass(frozen=True)
class Library(ABC):
    """A library to build. `file` is its name in the directory of the build, and in the artifact."""

    name: str
    file: str
    inputs: Inputs = field(repr=False)

    @abstractmethod
    def build(self, directory: Path) -> None:
        """Build `file` in the new `directory`. Raises the builder's own exceptions."""

    @abstractmethod
    def load(self, directory: Path) -> Any:
        """The builder's answer to its caller, for the library in `directory`."""

    def unchanged(self) -> bool:
        """False if the build may have read other inputs than these."""
        return self.inputs.unchanged()

    def factors(self) -> Mapping[str, Any]:
        """Everything that the library depends on beside `inputs`."""
        return {}


def put(library: Path, target: Path) -> None:
    """Make `target` a copy of `library`, whole, and only if it differs: other ranks may have it mapped. Raises OSError."""
    content = library.read_bytes()
    if not target.exists() or target.read_bytes() != content:
        replace_file(target, content)
        target.chmod(0o755)


def inputs_of(file: Path, directory: Path, local_dir: Path) -> tuple[Inputs, str]:
    """The inputs of the ninja `file`, run in `directory`, and its last output.

    Raises what `kcoord.keys.tools.commands.inputs_of` raises, OSError if ninja is missing, and ValueError if nothing is built, or
    if a flag is relative to `directory`.
    """
    listed = commands.output_of(["ninja", "-C", str(directory), "-f", str(file), "-t", "compdb"])
    edges = [edge for edge in json.loads(listed[listed.index("[") :]) if edge["file"]]
    if not edges:
        raise ValueError("the file builds nothing")
    built = [shlex.split(edge["command"]) for edge in edges]
    made = {edge["output"] for edge in edges}
    for command in built:
        for flag, argument in itertools.pairwise(command):
            if _is_relative(flag, argument, made):
                raise ValueError(f"{argument} is relative to the directory of the build")
    sources = sorted({edge["file"] for edge in edges if not edge["file"].endswith(".o")})
    lists = SharedHeaderLists(connect())
    return commands.inputs_of(built, sources, directory, local_dir, lists=lists), str(edges[-1]["output"])


def _is_relative(flag: str, argument: str, made: set[str]) -> bool:
    """True for a directory or a library that is named relative to the directory of the build."""
    joined = next((each for each in _DIRECTORIES if argument.startswith(each)), "")
    if argument in _DIRECTORIES:
        return False
    if flag in _DIRECTORIES or joined:
        return not argument.removeprefix(joined).startswith("/")
    is_library = argument.endswith(_LIBRARIES) and not argument.startswith("-")
    return is_library and argument not in made and not argument.startswith("/")
