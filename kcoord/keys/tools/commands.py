"""The inputs of compiler commands: sources, headers, libraries that are named, and the compilers themselves.

Headers are named by the compiler (``-M``), once on each machine; they are looked up again when a source, a flag or one of the
headers has changed. Not seen: a new header that would be found before one of these, as in ccache's direct mode.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.keys.tools.machine_cache import Stamp, cached, is_settled, stamp_of

PLACE = "BUILD"
"""Stands for a directory that no output depends on."""
_ENDS = 120.0  # seconds, for one look at headers
COMPILES = frozenset(
    {"-c", "--compile", "-dc", "--device-c", "-S", "-cubin", "--cubin", "-ptx", "--ptx", "-fatbin", "--fatbin"}
)
"""Flags of host compilers and nvcc by which a source is compiled, and nothing is linked."""
_LEFT_OUT = COMPILES | {"-MMD", "-MD", "--generate-dependencies-with-compile"}
_WITH_PATH = {"-MF", "-o"}
_TIMED = re.compile(rb"__(?:DATE|TIME|TIMESTAMP)__")


@dataclass(frozen=True)
class _File:
    """A source or a header, as it was read. `is_timed`: it may put the time of the compile into the output."""

    path: str
    stamp: Stamp
    digest: str
    is_timed: bool


@dataclass(frozen=True)
class Inputs:
    """Of one build. `text` is its commands, with `PLACE` for its directories; `files` the digests of sources and headers.

    `tools`: the compilers and what they link, by name or path. `paths`: of sources and headers.
    """

    text: str
    files: tuple[str, ...]
    tools: tuple[str, ...]
    is_timed: bool
    paths: tuple[str, ...] = field(compare=False)
    stamps: tuple[Stamp, ...] = field(compare=False)

    def unchanged(self) -> bool:
        """False if a source or a header has been written since."""
        return all(map(_has_stamp, self.paths, self.stamps))


def inputs_of(
    commands: Sequence[Sequence[str]],
    sources: Sequence[str],
    directory: Path,
    places: Iterable[str],
    local_dir: Path,
    environment: bytes,
) -> Inputs:
    """Of `commands`, which run in `directory`. `places`: the directories that `PLACE` stands for.

    Raises OSError and `subprocess.SubprocessError` if a compiler or a file is missing, or a source includes what is not there.
    Raises ValueError for what it does not understand.
    """
    text = "\n".join(shlex.join(command) for command in commands)
    for place in places:
        text = text.replace(place, PLACE)
    read = [_read(source) for source in sources]
    name = hashlib.sha256(environment)
    for part in (text, *(file.digest for file in read)):
        name.update(part.encode() + b"\0")

    def load(rows: Any) -> list[_File] | None:
        found = [_File(path, (*stamp,), *more) for path, stamp, *more in rows]
        return found if all(_has_stamp(file.path, file.stamp) for file in found) else None

    def compute(_: Any) -> tuple[list[_File], Any]:
        begun = time.time_ns()
        compiles = [command for command in commands if not COMPILES.isdisjoint(command)]
        headers = dict.fromkeys(header for command in compiles for header in _headers(command, directory))
        files = [_read(header) for header in headers]
        rows = [(file.path, file.stamp, file.digest, file.is_timed) for file in files]
        return files, rows if all(is_settled(file.stamp, begun) for file in files) else None

    read += cached(local_dir, f"headers-{name.hexdigest()[:32]}", load, compute)
    return Inputs(
        text,
        tuple(file.digest for file in read),
        tuple(dict.fromkeys(_tools(commands, sources))),
        any(file.is_timed for file in read),
        tuple(file.path for file in read),
        tuple(file.stamp for file in read),
    )


def _read(path: str) -> _File:
    stamp = stamp_of(os.stat(path))  # noqa: PTH116 - of thousands; taken first: a change during the read gives another
    content = Path(path).read_bytes()
    return _File(path, stamp, hashlib.sha256(content).hexdigest(), bool(_TIMED.search(content)))


def _has_stamp(path: str, stamp: Stamp) -> bool:
    try:
        return stamp_of(os.stat(path)) == stamp  # noqa: PTH116 - as above
    except OSError:
        return False


def _headers(command: Sequence[str], directory: Path) -> Iterator[str]:
    """The files that a compile reads, as the compiler names them; ``-M`` makes it stop before it compiles."""
    arguments, skipped = [], False
    for argument in command:
        if skipped or argument in _LEFT_OUT or argument in _WITH_PATH:
            skipped = argument in _WITH_PATH
            continue
        arguments.append(argument)
    rule = output_of([*arguments, "-M"], cwd=directory)
    _, _, names = rule.replace("\\\n", " ").partition(": ")
    for name in shlex.split(names)[1:]:  # less the source
        yield str((directory / name).resolve())


def _tools(commands: Sequence[Sequence[str]], sources: Sequence[str]) -> Iterator[str]:
    """The compilers, with a wrapper such as ccache, and the files that flags name: libraries, plugins, linker scripts.

    Outputs of an earlier build, of these commands, are none of them. Raises ValueError for flags in a file.
    """
    made = {value for command in commands for flag, value in itertools.pairwise(command) if flag in _WITH_PATH}
    for command in commands:
        directories = [Path(argument[2:]) for argument in command if argument.startswith("-L")]
        first = itertools.takewhile(lambda argument: argument == "--" or not argument.startswith("-"), command)
        yield from (argument for argument in first if argument != "--" and argument not in sources)
        for argument in command[1:]:
            named = argument.rpartition("=")[2]
            if argument.startswith("@"):
                raise ValueError(f"flags in a file: {argument}")
            if argument.startswith("-l"):
                found = (d / f"lib{argument[2:]}{end}" for d in directories for end in (".so", ".a"))
                yield from (str(path) for path in found if path.is_file())
            elif named.startswith("/") and named not in made and named not in sources and Path(named).is_file():
                yield named


def output_of(command: Sequence[str], cwd: Path | None = None) -> str:
    """Raises OSError and `subprocess.SubprocessError`."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_ENDS, check=True).stdout
