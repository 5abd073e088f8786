"""The inputs of a ninja file's build."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from kcoord.keys.tools import commands
from kcoord.keys.tools.commands import Inputs


def inputs_of(directory: Path, place: Path, local_dir: Path, environment: bytes) -> Inputs:
    """Of the file ``build.ninja`` in `directory`. `place`: where torch would build, and has perhaps put the sources.

    Raises what `kcoord.keys.tools.commands.inputs_of` raises, and OSError if ninja is missing.
    """
    listed = commands.output_of(["ninja", "-C", str(directory), "-t", "compdb"])
    edges = json.loads(listed.partition("\n")[2] if listed.startswith("ninja:") else listed)
    built = [shlex.split(edge["command"]) for edge in edges if edge["file"]]
    sources = sorted({edge["file"] for edge in edges if not edge["file"].endswith(".o")})
    return commands.inputs_of(built, sources, directory, (str(directory), str(place)), local_dir, environment)
