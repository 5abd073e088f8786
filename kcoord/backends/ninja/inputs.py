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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.keys.tools.machine_cache import Stamp, cached, hash_file, is_settled, stamp_of

_PLACE = "BUILD"
_ENDS = 120.0  # seconds, for one look at headers
_WRITES_DEPENDENCIES = {"-MMD", "-MD", "-c"}
_WITH_PATH = {"-MF", "-o"}
_Read = tuple[str, Stamp, str]  # path, stamp, digest


@dataclass(frozen=True)
class Inputs:
    """Of one build. `text` is its commands, with `_PLACE` for the directory; `files` the digests of sources and headers.

    `tools`: the compilers and what they link, by name or path. `stamps`: of sources and headers, as they were read.
    """

    text: str
    files: tuple[str, ...]
    tools: tuple[str, ...]
    stamps: tuple[tuple[str, Stamp], ...] = field(compare=False)

    def unchanged(self) -> bool:
        """False if a source or a header has been written since."""
        return all(_stamp(path) == stamp for path, stamp in self.stamps)


def inputs_of(directory: Path, place: Path, local_dir: Path, environment: bytes) -> Inputs:
    """Of the file ``build.ninja`` in `directory`. `place`: where torch would build, and has perhaps put the sources.

    Raises OSError and `subprocess.SubprocessError` if ninja, a compiler or a file is missing, or a source includes what is not
    there: then torch, too, cannot build. Raises ValueError for what it does not understand.
    """
    edges = json.loads(_output(["ninja", "-C", str(directory), "-t", "compdb"], skips_first_line=True))
    commands = [shlex.split(edge["command"]) for edge in edges if edge["file"]]
    text = "\n".join(shlex.join(command) for command in commands)
    text = text.replace(str(directory), _PLACE).replace(str(place), _PLACE)
    sources = sorted({edge["file"] for edge in edges if not edge["file"].endswith(".o")})
    read = [_read(source) for source in sources]
    name = hashlib.sha256(environment)
    for part in (text, *(digest for _, _, digest in read)):
        name.update(part.encode() + b"\0")

    def load(rows: Any) -> list[_Read] | None:
        found = [(path, (*stamp,), digest) for path, stamp, digest in rows]
        return found if all(_stamp(path) == stamp for path, stamp, _ in found) else None

    def compute(_: Any) -> tuple[list[_Read], Any]:
        begun = time.time_ns()
        headers = dict.fromkeys(h for command in commands if "-c" in command for h in _headers(command, directory))
        rows = [_read(header) for header in headers]
        return rows, rows if all(is_settled(stamp, begun) for _, stamp, _ in rows) else None

    read += cached(local_dir, f"headers-{name.hexdigest()[:32]}", load, compute)
    return Inputs(
        text,
        tuple(digest for _, _, digest in read),
        tuple(dict.fromkeys(_tools(commands, sources))),
        tuple((path, stamp) for path, stamp, _ in read),
    )


def _read(path: str) -> _Read:
    found = stamp_of(os.stat(path))  # noqa: PTH116 - of thousands; taken first: a change during the read gives another
    return path, found, hash_file(path)[0]


def _stamp(path: str) -> Stamp | None:
    try:
        return stamp_of(os.stat(path))  # noqa: PTH116 - as above
    except OSError:
        return None


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
