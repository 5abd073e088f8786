"""The inputs of a ninja file's build: commands, sources, headers, libraries and the compilers themselves.

Headers are named by the compiler (``-M``), once on each machine; they are looked up again when a source, a flag or one of the
headers has changed. Not seen: a new header that would be found before one of these, as in ccache's direct mode.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcoord.keys.tools.machine_cache import cached, hash_file, stamp_of

_PLACE = "BUILD"
_ENDS = 120.0  # seconds, for one look at headers
_WRITES_DEPENDENCIES = {"-MMD", "-MD", "-c"}
_WITH_PATH = {"-MF", "-o"}


@dataclass(frozen=True)
class Inputs:
    """Of one build. `text` is its commands, with `_PLACE` for the directory; `files` the digests of sources and headers.

    `tools`: the compilers and what they link, by name or path.
    """

    text: str
    files: tuple[str, ...]
    tools: tuple[str, ...]


def inputs_of(directory: Path, place: Path, local_dir: Path, environment: bytes) -> Inputs:
    """Of the file ``build.ninja`` in `directory`. `place`: where torch would build, and has perhaps put the sources.

    Raises OSError and `subprocess.SubprocessError` if ninja, a compiler or a file is missing, or a source includes what is not
    there: then torch, too, cannot build. Raises ValueError for what it does not understand.
    """
    edges = json.loads(_output(["ninja", "-C", str(directory), "-t", "compdb"], skips_first_line=True))
    commands = [shlex.split(edge["command"]) for edge in edges if edge["file"]]
    compiles = [command for command in commands if "-c" in command]
    text = "\n".join(shlex.join(command) for command in commands)
    text = text.replace(str(directory), _PLACE).replace(str(place), _PLACE)
    sources = sorted({edge["file"] for edge in edges if not edge["file"].endswith(".o")})
    name = hashlib.sha256(environment)
    digests = [hash_file(path)[0] for path in sources]
    for part in (text, *digests):
        name.update(part.encode() + b"\0")

    def load(entry: Any) -> tuple[str, ...] | None:
        found = []
        for path, stamp, digest in entry:
            try:
                if tuple(stamp) != stamp_of(os.stat(path)):  # noqa: PTH116 - of thousands
                    return None
            except OSError:
                return None
            found.append(digest)
        return tuple(found)

    def compute(_: Any) -> tuple[tuple[str, ...], Any]:
        headers = dict.fromkeys(header for command in compiles for header in _headers(command, directory))
        rows = [(header, *hash_file(header)) for header in headers]
        settled = all(stamp is not None for _, _, stamp in rows)
        return tuple(d for _, d, _ in rows), [[h, s, d] for h, d, s in rows] if settled else None

    headers = cached(local_dir, f"headers-{name.hexdigest()[:32]}", load, compute)
    return Inputs(text, (*digests, *headers), tuple(dict.fromkeys(_tools(commands, sources))))


def _headers(command: Sequence[str], directory: Path) -> Iterator[str]:
    """The files that a compile reads, as the compiler names them; ``-M`` makes it stop before it compiles."""
    arguments, skipped = [], False
    for argument in command:
        if skipped or argument in _WRITES_DEPENDENCIES or argument in _WITH_PATH:
            skipped = argument in _WITH_PATH
            continue
        arguments.append(argument)
    rule = _output([*arguments, "-M"], cwd=directory)
    _, _, names = rule.replace("\\\n", " ").partition(": ")
    for name in shlex.split(names)[1:]:  # less the source
        yield str((directory / name).resolve())


def _tools(commands: Sequence[Sequence[str]], sources: Sequence[str]) -> Iterator[str]:
    """The compilers, with a wrapper such as ccache, and the files that flags name: libraries, plugins, linker scripts.

    Raises ValueError for flags in a file.
    """
    for command in commands:
        directories = [Path(argument[2:]) for argument in command if argument.startswith("-L")]
        yield from itertools.takewhile(lambda argument: not argument.startswith("-"), command)
        for argument in command[1:]:
            named = argument.rpartition("=")[2]
            if argument.startswith("@"):
                raise ValueError(f"flags in a file: {argument}")
            if argument.startswith("-l"):
                found = (d / f"lib{argument[2:]}{end}" for d in directories for end in (".so", ".a"))
                yield from (str(path) for path in found if path.is_file())
            elif named.startswith("/") and named not in sources and Path(named).is_file():
                yield named


def _output(command: Sequence[str], cwd: Path | None = None, skips_first_line: bool = False) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_ENDS, check=True)
    return done.stdout.partition("\n")[2] if skips_first_line and done.stdout.startswith("ninja:") else done.stdout
