"""The tools that a compiler runs, by their content: ptxas, nvcc, ld.lld, libdevice, never by their paths or versions alone.

A look costs a `stat` per file as long as nothing changed; content is hashed once per machine (`kcoord.keys.tools.machine_cache`).

Followed: symbolic links, what nvcc and hipcc run from their own directories, and the absolute paths that a wrapper script
names. Not followed: what a script makes of variables, and what a host compiler runs (its `cc1plus`, its headers).
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.keys.tools.machine_cache import (
    Stamp,
    hash_file,
    once,
    stamp_of,
)

_BESIDE = {
    "nvcc": (
        "cicc", "ptxas", "fatbinary", "nvlink", "cudafe++", "nvcc.profile",
        "../nvvm/bin/cicc", "../nvvm/libdevice/libdevice.10.bc",
    ),
    "hipcc": ("../llvm/bin/clang++", "../llvm/bin/ld.lld"),
}  # fmt: skip
"""What a tool runs from its own directory: the driver's bytes say nothing about it."""

_LONGEST_SCRIPT = 64 << 10  # bytes
_MOST_NAMED = 64
_ABSOLUTE_PATH = re.compile(rb"(?<![\w.${}~/-])/[\w.+/-]+")


@dataclass(frozen=True)
class Tool:
    """A tool's file. Only `sha256` identifies it."""

    path: str = field(compare=False)
    """Without symbolic links."""
    sha256: str
    runs: tuple[str, ...] = field(compare=False)
    """What it may run in its turn; some of it may be missing."""


_known: dict[str, tuple[Stamp, Tool]] = {}
"""By the path that was asked for. A file that may still change unseen is not in it."""


def fingerprint(path: str | os.PathLike[str], local_dir: Path) -> Tool | None:
    """The file at `path` as it is now; None if there is none that can be read. Raises nothing for what is on the disk.

    `local_dir` is `Settings.local_dir`: what was found out is kept there for the other processes of this machine.
    """
    path = os.fspath(path)
    try:
        found = os.stat(path)  # noqa: PTH116 - a launch may pass here
    except (OSError, ValueError):
        return None
    known = _known.get(path)
    if known is not None and known[0] == stamp_of(found):
        return known[1]
    return _look_up(path, local_dir) if stat.S_ISREG(found.st_mode) else None


def _look_up(path: str, local_dir: Path) -> Tool | None:
    real = Path(os.path.realpath(path))

    def recall(entry: Any) -> tuple[Stamp | None, Tool] | None:
        kept, sha256, named = entry
        stamp = stamp_of(real.stat())
        return (stamp, Tool(str(real), sha256, _beside(real, named))) if tuple(kept) == stamp else None

    def find(_: Any) -> tuple[tuple[Stamp | None, Tool], Any]:
        sha256, stamp = hash_file(real)
        named = _named_by(real)
        return (stamp, Tool(str(real), sha256, _beside(real, named))), stamp and [stamp, sha256, named]

    name = hashlib.sha256(os.fsencode(real)).hexdigest()[:32]
    try:
        stamp, tool = once(local_dir, f"tool-{name}", recall, find)
    except OSError:
        return None
    if stamp is not None:
        _known[path] = stamp, tool
    return tool


def _named_by(path: Path) -> list[str]:
    """What a script names by absolute path, its interpreter aside, be it there or not; nothing for what is no script."""
    with path.open("rb") as file:
        if file.read(2) != b"#!":
            return []
        text = file.read(_LONGEST_SCRIPT).partition(b"\n")[2]
    return sorted({os.fsdecode(named) for named in _ABSOLUTE_PATH.findall(text)} - {str(path)})[:_MOST_NAMED]


def _beside(path: Path, named: Iterable[str]) -> tuple[str, ...]:
    return (*(str(path.parent / part) for part in _BESIDE.get(path.name, ())), *named)


def which(name: str) -> str | None:
    """The file that ``PATH``, read live, gives for `name`; a name with a slash is a path already."""
    if "/" in name:
        return name
    for candidate in _candidates(name, os.environ.get("PATH", os.defpath)):
        if os.access(candidate, os.X_OK) and os.path.isfile(candidate):  # noqa: PTH113 - as above
            return candidate
    return None


@functools.lru_cache(maxsize=256)
def _candidates(name: str, path: str) -> tuple[str, ...]:
    return tuple(str(Path(directory, name)) for directory in dict.fromkeys(path.split(os.pathsep)))


def tools(asked: Mapping[str, str] | Iterable[str | os.PathLike[str]], local_dir: Path) -> dict[str, Tool]:
    """The tools of these names or paths, and those that they run, by label: ``nvcc``, ``nvcc/cicc``. Missing ones are absent.

    A mapping gives the labels itself; else they are the names of the files.
    """
    named = asked.items() if isinstance(asked, Mapping) else ((Path(name).name, os.fspath(name)) for name in asked)
    found: dict[str, Tool] = {}
    for top, name in named:
        path = which(name)
        for label, tool in _with_what_it_runs(path, top, local_dir, set()) if path else ():
            while label in found:  # two of one name, in two directories
                label += "'"
            found[label] = tool
    return found


def _with_what_it_runs(path: str, label: str, local_dir: Path, seen: set[str]) -> Iterator[tuple[str, Tool]]:
    tool = fingerprint(path, local_dir)
    if tool is None or tool.path in seen:
        return
    seen.add(tool.path)
    yield label, tool
    for part in tool.runs:
        yield from _with_what_it_runs(part, f"{label}/{part.rpartition('/')[2]}", local_dir, seen)


def tool_factors(found: Mapping[str, Tool]) -> dict[str, Any]:
    """What enters a key: the content of each tool, and not the directory that it lies in."""
    return {"tools": {label: tool.sha256 for label, tool in found.items()}}
