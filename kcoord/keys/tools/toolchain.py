"""The tools that a compiler runs, by their content: ptxas, nvcc, ld.lld, libdevice, never by their paths or versions alone.

A fingerprint of unchanged files costs a `stat` each; content is hashed once per machine (`kcoord.keys.tools.machine_cache`).

Followed: symbolic links, the programs that nvcc and hipcc run, the passes of gcc and clang, and scripts. A script is not
understood: whatever one of its words may mean counts. That is a path, a variable of the environment, or the name of a file beside
the script, in a directory that it names, or on ``PATH``; of a text among these files the words are read, too. If a script asks
for its own place, all files there count, of at most 32, but for logs: it may compute the name of one that it reads.

Not followed: names that a script puts together from parts, what it names after its first 16 KiB, modules that it imports, and
shared libraries.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.keys.cache_key import CacheKey, make_factor
from kcoord.keys.tools import record
from kcoord.keys.tools.machine_cache import Stamp, cached, hash_file, is_settled, stamp_of

_RUNS = {
    "nvcc": (
        "./cicc", "./ptxas", "./fatbinary", "./nvlink", "./cudafe++", "./nvcc.profile",
        "../nvvm/bin/cicc", "../nvvm/libdevice/libdevice.10.bc", "gcc", "g++", "NVCC_CCBIN",
    ),
    "tileiras": (
        "./ptxas", "../nvvm/lib64/libnvvm.so", "../lib/libnvvm.so.4", "bin/ptxas", "nvvm/lib64/libnvvm.so", "lib/libnvvm.so.4",
        "CUDA_HOME", "CUDA_PATH", "CUDA_ROOT",
    ),
    "hipcc": ("../llvm/bin/clang++", "../llvm/bin/ld.lld"),
}  # fmt: skip
"""Programs and files that a tool uses, from its own directory or ``PATH``: the driver's bytes do not identify them."""
_HOST_COMPILER = re.compile(r"(?:.*-)?(?:cc|gcc|c\+\+|g\+\+|(?:amd)?clang(?:\+\+)?)(?:-[\d.]+)?")
_PASSES = ("cc1", "cc1plus", "lto1", "collect2", "as", "ld", "COMPILER_PATH")
"""Programs that a host compiler runs, from the directories that it names or from ``PATH``."""
LAUNCHERS = frozenset({"ccache", "sccache", "distcc", "icecc"})
"""Programs that run the next compiler on ``PATH`` that has the name of the link that they were called by."""

_ANSWERS = 20.0  # seconds, for a compiler
_LONGEST_SCRIPT = 16 << 10  # bytes
_FEW = 32  # files beside a script
_LOGS = (".err", ".lock", ".log", ".out", ".pid", ".tmp")
_WORD = re.compile(rb"([\s=:]?)([\w.+@/-]+)")
_VARIABLE = re.compile(rb"\$\{?(\w+)")
_OWN_PLACE = re.compile(rb"\$\{?0|BASH_SOURCE|__file__|argv|FindBin")
_NOT_READ = frozenset(re.findall(r"\S+", """
    _ HOME HOST HOSTNAME LANG LANGUAGE LOGNAME OLDPWD PATH PWD SHELL SHLVL TEMP TERM TMP TMPDIR USER
    GROUP_RANK LOCAL_RANK MASTER_ADDR MASTER_PORT RANK"""))  # fmt: skip
_OF_A_LAUNCHER = ("LC_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "KCOORD_")
"""Variables that differ between equal ranks and jobs, and beginnings of such; what ``PATH`` and ``HOME`` lead to counts."""
_LARGEST_BESIDE = 1 << 20  # bytes, of a file that no word of the script beside it names
_UNREADABLE = ("/dev/", "/proc/", "/sys/")  # their files are no content, and may never end
_NO_COMPILERS = frozenset(re.findall(r"\S+", """
    [ awk basename bash cat cd chmod command cp cut date diff dir dirname echo ed env expr false file find free grep head id
    install join last link ls man mkdir mktemp more mv open perl printf pwd python3 readlink realpath rm script sed sh sleep sort
    split stat tail tar tee test touch tr true type uname uniq unlink w wc which who xargs yes"""))  # fmt: skip
"""Programs of every machine whose names are words of many a script."""


@dataclass(frozen=True)
class Tool:
    """A tool's file. Only `sha256` identifies it."""

    path: str = field(compare=False)
    """Without symbolic links."""
    sha256: str
    words: frozenset[str] = field(default=frozenset(), compare=False)
    """Paths, and names of files and variables, that it may use; some may not exist. ``$0``: it asks for its place."""
    settings: frozenset[str] = field(default=frozenset(), compare=False)
    """The same of a text, for a script that reads it."""


_known: dict[str, tuple[Stamp, Tool]] = {}
"""Tools by the requested path. A file that may still change without a new stamp is not in it."""
_walks: dict[Any, tuple[dict[str, str], Mapping[str, Stamp | None], dict[str, Tool]]] = {}
"""Tools by the paths that were asked for, with the environment and the stamps of all files and directories on the way."""
_MOST_WALKS = 64
_borrowed: dict[str, str] = {}
"""Names of borrowed compilers, by the digest of the factor `tools` that they are in."""
_listings: dict[str, tuple[Stamp, frozenset[str]]] = {}
"""Names in directories."""


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
    is_file = stat.S_ISREG(found.st_mode) and not os.path.realpath(path).startswith(_UNREADABLE)
    return _look_up(path, local_dir) if is_file else None


def _look_up(path: str, local_dir: Path) -> Tool | None:
    real = Path(os.path.realpath(path))

    def load(entry: Any) -> Any:
        return entry if tuple(entry[0]) == stamp_of(real.stat()) else None

    def compute(_: Any) -> tuple[Any, Any]:
        sha256, stamp = hash_file(real)
        *content, is_complete = _content(real, sha256)
        entry = [stamp, *content]
        return entry, entry if stamp and is_complete else None

    name = hashlib.sha256(os.fsencode(real)).hexdigest()[:32]
    try:
        stamp, sha256, words, settings = cached(local_dir, f"tool-{name}", load, compute)
    except OSError:
        return None
    if real.name in LAUNCHERS and Path(path).name != real.name:
        words = [Path(path).name, "CCACHE_COMPILER", "CCACHE_PATH"]
    tool = Tool(str(real), sha256, frozenset(words), frozenset(settings))
    if stamp is not None:
        _known[path] = tuple(stamp), tool
    return tool


def _content(path: Path, sha256: str) -> tuple[str, list[str], list[str], bool]:
    """`Tool`'s fields but for the path, and whether they are complete: a compiler may fail to answer once.

    A clang's hash holds its version: its code is in a shared library.
    """
    with path.open("rb") as file:
        text = file.read(_LONGEST_SCRIPT)
    runs = [*_RUNS.get(path.name.partition("-")[0], ())]
    if text.startswith(b"\x7fELF") and _HOST_COMPILER.fullmatch(path.name):
        answer = _asked(path)
        version, places = answer or ("", [])
        sha256 = hashlib.sha256(f"{sha256} {version}".encode()).hexdigest()
        return sha256, [*_PASSES, *places], [], answer is not None
    if b"\0" in text:
        return sha256, runs, [], True
    words = _words(b"\n".join(line for line in text.splitlines() if not line.lstrip().startswith(b"#")))
    if not text.startswith(b"#!"):
        return sha256, runs, sorted(words), True
    first = os.fsdecode(text.splitlines()[0][2:]).split()
    interpreters = [word for word in first if word.rpartition("/")[2] not in _NO_COMPILERS]
    own = ["$0"] if _OWN_PLACE.search(text) or "python" in "".join(first) else []  # it finds modules beside itself
    return sha256, sorted({"#!", *runs, *words, *interpreters, *own}), [], True


@functools.lru_cache(maxsize=64)
def _asked(compiler: Path) -> tuple[str, list[str]] | None:
    """The version of a host compiler, without paths, and the directories in which it looks for its passes; None: no answer."""
    unset = ("COMPILER_PATH", "GCC_EXEC_PREFIX")
    environ = {name: value for name, value in os.environ.items() if name not in unset} | {"LC_ALL": "C"}
    command = [str(compiler), "-v", "-print-search-dirs"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environ, timeout=_ANSWERS)
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(rb" version .*", done.stderr)
    places = re.search(rb"^programs: =(.*)$", done.stdout, re.MULTILINE)
    found = {os.path.realpath(os.fsdecode(place)) for place in (places[1].split(b":") if places else [])}
    return os.fsdecode(version[0] if version else b""), sorted(found)


@functools.lru_cache(maxsize=256)
def _words(text: bytes) -> frozenset[str]:
    """The words of a script or of a variable's value; of one with slashes also the parts that may follow a directory."""
    found: set[str] = set()
    for before, match in _WORD.findall(_VARIABLE.sub(rb" \1 }", text.replace(b"~/", b"$HOME/"))):
        word = os.fsdecode(match)
        _, slash, rest = word.partition("/")
        found |= {word} if before and word[0] == "/" else {word.lstrip("-"), slash + rest, rest}
    return frozenset(found - {""})


def tools(
    asked: Mapping[str, str] | Iterable[str | os.PathLike[str]], local_dir: Path, ignore: Collection[str] = ()
) -> dict[str, Tool]:
    """The tools of these names or paths, and those that they run, by label: ``nvcc``, ``nvcc/cicc``. Missing ones are absent.

    A mapping gives the labels itself; else they are the file names. `ignore` names variables that a script may read all the same.
    """
    environ = dict(os.environ)
    named = asked.items() if isinstance(asked, Mapping) else ((Path(name).name, os.fspath(name)) for name in asked)
    tops = tuple(
        (top, name if "/" in name else shutil.which(name, path=environ.get("PATH", os.defpath))) for top, name in named
    )
    known = _walks.get((tops, frozenset(ignore)))
    if known is not None and known[0] == environ and _hold(known[1]):
        return known[2]
    found: dict[str, Tool] = {}
    look = _Look(local_dir, environ, ignore)
    for top, path in tops:
        for label, tool in _walked(path, top, look) if path else ():
            while label in found:  # two of one name, in two directories
                label += "'"
            found[label] = tool
    if lent := [top for top, path in tops if path and record.read(path)]:
        _borrowed[make_factor("tools", tool_factors(found)["tools"]).digest] = ", ".join(lent)
    if (
        len(_walks) < _MOST_WALKS
        and _hold(look.stamps)
        and all(is_settled(s, time.time_ns()) for s in look.stamps.values() if s)
    ):
        _walks[tops, frozenset(ignore)] = environ, look.stamps, found
    return found


def _hold(stamps: Mapping[str, Stamp | None]) -> bool:
    return all(_stamp(path) == stamp for path, stamp in stamps.items())


def _stamp(path: str) -> Stamp | None:
    try:
        return stamp_of(os.stat(path))  # noqa: PTH116 - as above
    except (OSError, ValueError):
        return None


class _Look:
    """Looks at each file and directory once, and at the environment as it was at first. `stamps` are of all that it looked at."""

    def __init__(self, local_dir: Path, environ: Mapping[str, str], ignore: Collection[str]) -> None:
        self.stamps: dict[str, Stamp | None] = {}
        self.tool = functools.cache(lambda path: fingerprint(self._stamped(path), local_dir))
        self.names = functools.cache(lambda directory: _names(self._stamped(directory)))
        self.environ, self._ignore = environ, ignore

    def _stamped(self, path: str) -> str:
        self.stamps[path] = _stamp(path)
        return path

    def variables(self, words: set[str]) -> dict[str, bytes]:
        """The variables among these words, but for those that differ between equal ranks."""
        named = sorted(words & self.environ.keys() - _NOT_READ - set(self._ignore))
        return {name: os.fsencode(self.environ[name]) for name in named if not name.startswith(_OF_A_LAUNCHER)}

    def values(self, words: set[str]) -> set[str]:
        """The words of the values of variables, and of that of ``HOME``, if it is among `words`."""
        values = [*self.variables(words).values(), *(os.fsencode(self.environ.get(n, "")) for n in words & {"HOME"})]
        return {word for value in values for word in _words(value)}


def _walked(path: str, label: str, look: _Look) -> Iterator[tuple[str, Tool]]:
    look.tool(path)  # stamps it
    stub = record.read(path)
    if stub is None:
        return _with_what_it_runs(path, label, look)
    return ((label + slash + part, Tool("", stub[name])) for name in stub for _, slash, part in (name.partition("/"),))


def _with_what_it_runs(path: str, label: str, look: _Look) -> Iterator[tuple[str, Tool]]:
    seen: set[str] = set()
    pending = [(path, label)]
    while pending:
        path, label = pending.pop()
        tool = look.tool(path)
        if tool is None or tool.path in seen:
            continue
        seen.add(tool.path)
        yield label, tool
        if not tool.words:
            continue
        own = dict.fromkeys((path.rpartition("/")[0], tool.path.rpartition("/")[0]))
        words, files, count = set(tool.words), list[str](), 0
        while len(words) > count:  # a variable may name settings, and they a variable, and that a file
            count = len(words)
            words |= look.values(words)
            files = list(dict.fromkeys(_files(words, own, look)))
            read = map(look.tool, files) if "#!" in words else ()
            words |= {word for text in read if text is not None for word in text.settings}
        for name, value in look.variables(words).items():
            yield f"{label}/${name}", Tool("", hashlib.sha256(value).hexdigest())
        pending += [(part, f"{label}/{part.rpartition('/')[2]}") for part in reversed(files)]


def _files(words: set[str], own: Collection[str], look: _Look) -> Iterator[str]:
    """The paths that these words of a tool in the directories `own` may mean, of files that exist or not."""
    absolute = sorted(word for word in words if word[0] == "/")
    relative = sorted(word for word in words if "/" in word and word[0] != "/")
    places = [*own, *filter(look.names, absolute)]
    on_path = look.environ.get("PATH", os.defpath).split(os.pathsep)
    places += [place for place in (f"{each}/{word}" for each in places for word in relative) if look.names(place)]
    yield from (*absolute, *(f"{place}/{word}" for place in places for word in relative))
    for place in (*places, *on_path):
        names = look.names(place)
        here = names & words - _NO_COMPILERS
        if place in own and "$0" in words and len(names) <= _FEW:
            here |= {name for name in names if not name.endswith(_LOGS) and _is_small(f"{place}/{name}")}
        yield from (f"{place}/{name}" for name in sorted(here))


def _is_small(path: str) -> bool:
    with suppress(OSError):
        return os.stat(path).st_size <= _LARGEST_BESIDE  # noqa: PTH116 - as above
    return False


def _names(directory: str) -> frozenset[str]:
    """The names in a directory; none if it is not one. An unchanged one costs a `stat`."""
    now = time.time_ns()
    try:
        stamp = stamp_of(os.stat(directory))  # noqa: PTH116 - as above
        known = _listings.get(directory)
        if known is None or known[0] != stamp:
            known = stamp, frozenset(os.listdir(directory))  # noqa: PTH208 - names alone
    except OSError:
        return frozenset()
    if is_settled(stamp, now):
        _listings[directory] = known
    return known[1]


def tool_factors(found: Mapping[str, Tool]) -> dict[str, Any]:
    """The key's factor `tools`: the content of each tool, and not the directory that it lies in."""
    return {"tools": {label: tool.sha256 for label, tool in found.items()}}


def borrowed_in(key: CacheKey) -> str:
    """The names of the compilers that this process has only borrowed, in a key that it has made; empty if there are none."""
    return next((_borrowed[each.digest] for each in key.factors if each.digest in _borrowed), "")


def toolchain_here(local_dir: Path) -> record.Toolchain:
    """The compilers on this machine's ``PATH``, not asked yet."""
    return record.observed(lambda path: {label: tool.sha256 for label, tool in tools([path], local_dir).items()})
