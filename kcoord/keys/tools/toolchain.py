"""The tools that a compiler runs, by their content: ptxas, nvcc, ld.lld, libdevice, never by their paths or versions alone.

A fingerprint of unchanged files costs a `stat` each; content is hashed once per machine (`kcoord.keys.tools.machine_cache`).

Followed: symbolic links, the programs that nvcc and hipcc run from their own directories, the passes of gcc and clang, and
scripts. A script is not understood. Whatever one of its words may mean counts: a file, a variable of the environment, a name
beside the script, below a directory that it names, or on ``PATH``. If it asks for its own place, so does every file there, of
at most 32 and without logs: it may compute the name of one that it reads.

Not followed: names that a script puts together from parts, what a script names after its first 64 KiB, modules that it imports,
shared libraries, and a pass's directory in ``GCC_EXEC_PREFIX``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import stat
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.keys.tools.machine_cache import Stamp, cached, hash_file, is_settled, stamp_of

_BESIDE = {
    "nvcc": (
        "./cicc", "./ptxas", "./fatbinary", "./nvlink", "./cudafe++", "./nvcc.profile",
        "../nvvm/bin/cicc", "../nvvm/libdevice/libdevice.10.bc", "gcc", "g++",
    ),
    "hipcc": ("../llvm/bin/clang++", "../llvm/bin/ld.lld"),
}  # fmt: skip
"""Files that a tool uses from its own directory, and programs of ``PATH``: the driver's bytes do not identify them."""
_HOST_COMPILER = re.compile(r"(?:.*-)?(?:cc|gcc|c\+\+|g\+\+|(?:amd)?clang(?:\+\+)?)(?:-[\d.]+)?")
_PASSES = ("cc1", "cc1plus", "lto1", "collect2", "as", "ld")
LAUNCHERS = frozenset({"ccache", "sccache", "distcc", "icecc"})
"""Programs that run the next compiler on ``PATH`` that has the name of the link that they were called by."""

_LONGEST_SCRIPT = 16 << 10  # bytes
_FEW = 32  # files beside a script
_LOGS = (".err", ".lock", ".log", ".out", ".pid", ".tmp")
_ANSWERS = 20.0  # seconds, for a compiler
_WORD = re.compile(rb"[\w.+@/-]+")
_VARIABLE = re.compile(rb"\$\{?(\w+)(?::?[-=+?])?")
_OWN_PLACE = re.compile(rb"\$\{?0|BASH_SOURCE|__file__|argv|FindBin")
_NOT_LISTED = frozenset({"/", "/tmp", "/var/tmp", "/dev", "/proc"})
_NOT_READ = frozenset({"PATH", "PWD", "OLDPWD", "SHLVL", "_"})
"""Variables that differ between equal jobs; names are looked up on ``PATH`` one by one."""
_NO_COMPILERS = frozenset(re.findall(r"\S+", """
    [ awk basename bash cat cd chmod chown cmp command cp cut date diff dir dirname echo ed egrep env expr false file find free
    grep head hostname id install join kill last less link ln locale look ls man mkdir mktemp more mv open printf pwd readlink
    realpath rm rmdir script sed sh size sleep sort split stat tail tar tee test time touch tr true type uname uniq unlink users w
    wc which who write xargs yes
"""))  # fmt: skip
"""Programs of every machine whose names are words of many a script."""


@dataclass(frozen=True)
class Tool:
    """A tool's file. Only `sha256` identifies it."""

    path: str = field(compare=False)
    """Without symbolic links."""
    sha256: str
    runs: tuple[str, ...] = field(default=(), compare=False)
    """Paths of tools that it may run in turn, or their names; some may not exist."""
    places: tuple[str, ...] = field(default=(), compare=False)
    """Directories in which names are looked up before those of ``PATH``."""
    words: frozenset[str] = field(default=frozenset(), compare=False)
    """If it is text. ``#!``: it is a script. ``$0``: it asks for its own place."""


_known: dict[str, tuple[Stamp, Tool]] = {}
"""Tools by the requested path. A file that may still change without a new stamp is not in it."""
_listings: dict[str, tuple[Stamp, frozenset[str]]] = {}


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
        cached_stamp, *content = entry
        stamp = stamp_of(real.stat())
        return (stamp, _tool(path, real, *content)) if tuple(cached_stamp) == stamp else None

    def compute(_: Any) -> tuple[tuple[Stamp | None, Tool], Any]:
        sha256, stamp = hash_file(real)
        content = (sha256, sorted(_words_in(real)), *_says(real))
        return (stamp, _tool(path, real, *content)), stamp and [stamp, *content]

    name = hashlib.sha256(os.fsencode(real)).hexdigest()[:32]
    try:
        stamp, tool = cached(local_dir, f"tool-{name}", load, compute)
    except OSError:
        return None
    if stamp is not None:
        _known[path] = stamp, tool
    return tool


def _tool(path: str, real: Path, sha256: str, words: Iterable[str], version: str, places: Iterable[str]) -> Tool:
    name = Path(path).name
    if real.name in LAUNCHERS and name != real.name:
        words = ("#!", name)
    if version:
        sha256 = hashlib.sha256(f"{sha256} {version}".encode()).hexdigest()
    runs = tuple(
        str(real.parent / part) if "/" in part else part for part in _BESIDE.get(real.name.partition("-")[0], ())
    )
    return Tool(str(real), sha256, runs or (_PASSES if places else ()), tuple(places), frozenset(words))


def _words_in(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        text = file.read(_LONGEST_SCRIPT)
    if b"\0" in text:
        return
    yield from _words(b"\n".join(line for line in text.splitlines() if not line.lstrip().startswith(b"#")))
    if text.startswith(b"#!"):
        yield "#!"
        if _OWN_PLACE.search(text):
            yield "$0"


@functools.lru_cache(maxsize=256)
def _words(text: bytes) -> frozenset[str]:
    """The words of a script or of a variable's value; of one with slashes also the parts that may follow a directory."""
    found: set[str] = set()
    for word in map(os.fsdecode, _WORD.findall(_VARIABLE.sub(rb" \1 ", text.replace(b"~/", b"$HOME/")))):
        _, slash, rest = word.partition("/")
        found |= {word.lstrip("-"), slash + rest, rest}
    return frozenset(found - {""})


def _says(path: Path) -> tuple[str, list[str]]:
    """The version of a host compiler, and the directories in which it looks for its passes; of another tool, nothing.

    A path in the former would make two keys of one compiler; clang's version is that of a library, whose content does not count.
    """
    with path.open("rb") as file:
        if not (_HOST_COMPILER.fullmatch(path.name) and file.read(4) == b"\x7fELF"):
            return "", []
    unset = ("COMPILER_PATH", "GCC_EXEC_PREFIX")
    environ = {name: value for name, value in os.environ.items() if name not in unset} | {"LC_ALL": "C"}
    try:
        done = subprocess.run([path, "-v", "-print-search-dirs"], capture_output=True, env=environ, timeout=_ANSWERS)
    except (OSError, subprocess.SubprocessError):
        return "", []  # it cannot compile either
    version = re.search(rb" version [^/\n]*", done.stderr)
    programs = re.search(rb"^programs: =(.*)$", done.stdout, re.MULTILINE)
    directories = programs[1].split(b":") if programs else []
    return os.fsdecode(version[0] if version else b""), list(
        dict.fromkeys(os.path.realpath(os.fsdecode(d)) for d in directories)
    )


def which(name: str, before: Iterable[str] = ()) -> str | None:
    """The file that `before` and ``PATH``, read live, have for `name`; a name with a slash is a path already."""
    if "/" in name:
        return name
    for candidate in _candidates(name, os.pathsep.join([*before, os.environ.get("PATH", os.defpath)])):
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
    own = dict.fromkeys((path.rpartition("/")[0], tool.path.rpartition("/")[0]))
    words = _meant(set(tool.words), own, local_dir) if "#!" in tool.words else set()
    for name in _variables(words):
        yield f"{label}/${name}", Tool("", hashlib.sha256(os.fsencode(os.environ[name])).hexdigest())
    for part in itertools.chain(_of_program(tool), _files(words, own), _on_path(words, local_dir, seen)):
        yield from _with_what_it_runs(part, f"{label}/{part.rpartition('/')[2]}", local_dir, seen)


def _of_program(tool: Tool) -> Iterator[str]:
    before = (*filter(None, os.environ.get("COMPILER_PATH", "").split(":")), *tool.places) if tool.places else ()
    yield from filter(None, (which(part, before) for part in tool.runs))


def _meant(words: set[str], own: Collection[str], local_dir: Path) -> set[str]:
    """The words of a script, and those of the variables that it reads and of the texts that it may read as settings."""
    words = words | {word for name in _variables(words) for word in _words(os.fsencode(os.environ[name]))}
    texts = filter(None, (fingerprint(file, local_dir) for file in _files(words, own)))
    words |= {word for text in texts if "#!" not in text.words for word in text.words}
    return words | {word for name in _variables(words) for word in _words(os.fsencode(os.environ[name]))}


def _variables(words: set[str]) -> list[str]:
    return sorted((words - _NOT_READ) & os.environ.keys())


def _files(words: set[str], own: Collection[str]) -> Iterator[str]:
    """The files that a script in the directories `own` may name, existing or not."""
    absolute = sorted(word for word in words if word.startswith("/"))
    places = [*own, *(each for each in absolute if _listing(each))] if words else []
    parts = [f"{place}/{word}" for word in sorted(words) if "/" in word[1:] and word[0] != "/" for place in places]
    yield from (*absolute, *parts)
    for place in (*places, *parts):
        names = _listing(place)
        is_whole = place in own and "$0" in words and len(names) <= _FEW
        here = {name for name in names if not name.endswith(_LOGS)} if is_whole else names & words - _NO_COMPILERS
        yield from (f"{place}/{name}" for name in sorted(here))


def _on_path(words: set[str], local_dir: Path, seen: set[str]) -> Iterator[str]:
    """The programs of ``PATH`` that a script names. One in `seen` is a wrapper, of the next one of its name."""
    named = words - _NO_COMPILERS
    for directory in os.environ.get("PATH", os.defpath).split(os.pathsep) if words else ():
        for name in sorted(named & _listing(directory)):
            path = f"{directory}/{name}"
            tool = fingerprint(path, local_dir) if os.access(path, os.X_OK) else None
            if tool is not None and tool.path not in seen:
                named.remove(name)
                yield path


def _listing(directory: str) -> frozenset[str]:
    """The names in a directory; none if it is not one. An unchanged one costs a `stat`."""
    now = time.time_ns()
    try:
        stamp = stamp_of(os.stat(directory))  # noqa: PTH116 - as above
        known = _listings.get(directory)
        if known is not None and known[0] == stamp:
            return known[1]
        names = frozenset(() if directory in _NOT_LISTED else os.listdir(directory))  # noqa: PTH208 - names alone
    except (OSError, ValueError):
        return frozenset()
    if is_settled(stamp, now):
        _listings[directory] = stamp, names
    return names


def tool_factors(found: Mapping[str, Tool]) -> dict[str, Any]:
    """The key's factor `tools`: the content of each tool, and not the directory that it lies in."""
    return {"tools": {label: tool.sha256 for label, tool in found.items()}}
