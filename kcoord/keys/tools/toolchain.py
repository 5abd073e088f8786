"""The tools that a compiler runs, by their content: ptxas, nvcc, ld.lld, libdevice, never by their paths or versions alone.

A fingerprint of unchanged files costs a `stat` each; content is hashed once per machine (`kcoord.keys.tools.machine_cache`).

Followed: symbolic links, the programs that nvcc and hipcc run from their own directories, and the absolute paths that a wrapper
script names. Not followed: paths that a script builds of variables, and the parts of a host compiler (`cc1plus`, headers).
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

from kcoord.keys.tools.machine_cache import Stamp, cached, hash_file, stamp_of

_BESIDE = {
    "nvcc": (
        "cicc", "ptxas", "fatbinary", "nvlink", "cudafe++", "nvcc.profile",
        "../nvvm/bin/cicc", "../nvvm/libdevice/libdevice.10.bc",
    ),
    "hipcc": ("../llvm/bin/clang++", "../llvm/bin/ld.lld"),
}  # fmt: skip
"""Programs and files that a tool uses from its own directory: the driver's bytes do not identify them."""

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
    """Paths of tools that it may run in turn; some may not exist."""


_known: dict[str, tuple[Stamp, Tool]] = {}
"""Tools by the requested path. A file that may still change without a new stamp is not in it."""


def fingerprint(path: str | os.PathLike[str], local_dir: Path) -> Tool | None:
    """The tool at `path` as it is now; None if there is no file that can be read. Raises no OSError.

    `local_dir` is `Settings.local_dir`, where the fingerprint is cached for the other processes of this machine.
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

    def load(entry: Any) -> tuple[Stamp | None, Tool] | None:
        cached_stamp, sha256, named = entry
        stamp = stamp_of(real.stat())
        return (stamp, Tool(str(real), sha256, _beside(real, named))) if tuple(cached_stamp) == stamp else None

    def compute(_: Any) -> tuple[tuple[Stamp | None, Tool], Any]:
        sha256, stamp = hash_file(real)
        named = _named_by(real)
        return (stamp, Tool(str(real), sha256, _beside(real, named))), stamp and [stamp, sha256, named]

    name = hashlib.sha256(os.fsencode(real)).hexdigest()[:32]
    try:
        stamp, tool = cached(local_dir, f"tool-{name}", load, compute)
    except OSError:
        return None
    if stamp is not None:
        _known[path] = stamp, tool
    return tool


def _named_by(path: Path) -> list[str]:
    """The absolute paths in a script, without its interpreter, existing or not; none if the file is no script."""
    with path.open("rb") as file:
        if file.read(2) != b"#!":
            return []
        text = file.read(_LONGEST_SCRIPT).partition(b"\n")[2]
    return sorted({os.fsdecode(named) for named in _ABSOLUTE_PATH.findall(text)} - {str(path)})[:_MOST_NAMED]


def _beside(path: Path, named: Iterable[str]) -> tuple[str, ...]:
    return (*(str(path.parent / part) for part in _BESIDE.get(path.name, ())), *named)


def which(name: str) -> str | None:
    """The file that ``PATH``, read live, has for `name`; a name with a slash is a path already."""
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

    A mapping gives the labels itself; else they are the file names.
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
    """The key's factor `tools`: the content of each tool, and not the directory that it lies in."""
    return {"tools": {label: tool.sha256 for label, tool in found.items()}}
