"""The inputs of compiler commands: sources, headers, libraries that are named, and the compilers themselves.

Headers are named by the compiler (``-M``), once on each machine; they are looked up again when the command, its directory, a
source or one of the headers has changed. Not seen: a new header that would be found before one of these, as in ccache's direct
mode; libraries in the linker's own directories.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgpack

from kcoord.keys.environment import TOOLCHAIN_VARIABLES, Environment
from kcoord.keys.tools import record
from kcoord.keys.tools.machine_cache import Stamp, cached, is_settled, stamp_of
from kcoord.keys.tools.toolchain import LAUNCHERS, fingerprint

_PLACE = "PLACE"
"""Stands for a directory that no output depends on."""
_NOWHERE = (0, 0, 0, 0)  # the stamp of a header that is on another machine
_LONGEST_LIST = 8 << 20  # bytes of names
_ENDS = 120.0  # seconds, for one look at headers
COMPILES = frozenset(
    {"-c", "--compile", "-dc", "--device-c", "-S", "-cubin", "--cubin", "-ptx", "--ptx", "-fatbin", "--fatbin"}
)
"""Flags of host compilers and nvcc by which a source is compiled, and nothing is linked."""
_LEFT_OUT = COMPILES | {"-MMD", "-MD", "--generate-dependencies-with-compile"}
_WRITES = frozenset({"-MF", "-o", "--dependency-output"})
"""Flags whose value, the next argument, is a file that is written."""
_INCLUDES = ("-I", "-isystem", "-iquote", "-idirafter", "--include-path", "--system-include")
"""Flags of the directories of headers, which count by their content."""
_OUTPUTS = (".o", ".so", ".d", ".cubin", ".ptx")
_NINJAS = {"build.ninja", ".ninja_log", ".ninja_deps", ".ninja_lock", "lock"}
"""Files in a directory that extensions are built in."""
_HOST_COMPILER = ("-ccbin", "--compiler-bindir")
_TIMED = re.compile(rb"__(?:DATE|TIME|TIMESTAMP)__")
_READS_MORE = re.compile(rb"\.incbin\b|\.include\s*\\?\"")
"""Directives of the assembler, whose files ``-M`` does not name."""
_GPU_THAT_IS_HERE = re.compile(r"(?<!m)arch(?:itecture)?[= ]native\b")
_NAMES_GPU = ("--offload-arch", "--amdgpu-target")

VARIABLES = {n: why for n, why in TOOLCHAIN_VARIABLES.items() if n not in ("CC", "CXX", "NVCC_CCBIN", "PYTORCH_NVCC")}
"""The variables that count beside commands. Compilers count by their content: see `Inputs.tools`."""
_environment = Environment(TOOLCHAIN_VARIABLES)


@dataclass(frozen=True)
class _File:
    """A source or a header, as it was read. `is_timed`: it may put the time of the compile into the output."""

    path: str
    stamp: Stamp
    digest: str
    is_timed: bool

    def is_still_there(self) -> bool:
        try:
            return stamp_of(os.stat(self.path)) == self.stamp  # noqa: PTH116 - of thousands
        except OSError:
            return False

    def is_replaced(self) -> bool:
        """True if another file of equal content is at its path now."""
        try:
            now = _read(self.path)
            return now.stamp[0] != self.stamp[0] and now.digest == self.digest
        except (OSError, ValueError):
            return False


@dataclass(frozen=True)
class Inputs:
    """The inputs of one build. `text` is its commands, where paths of sources, headers and outputs are left out.

    `files` has a digest of each source, and one of the headers of each compile. `tools`: the compilers and what they link, by
    name or path. `is_native`: the output may depend on the processor. `read`: sources and headers.
    """

    text: str
    files: tuple[str, ...]
    tools: tuple[str, ...]
    is_timed: bool
    is_native: bool
    read: tuple[_File, ...] = field(compare=False)

    @property
    def paths(self) -> list[str]:
        return [file.path for file in self.read]

    def unchanged(self, copied: Collection[str] = ()) -> bool:
        """False if the build may have read anything else. `copied`: sources of which it read copies with these digests.

        A file that was replaced, whole, by equal bytes is as good. One that was written in place is not: for a moment it was
        empty, and a compiler may have read that.
        """
        return all(file.path in copied or file.is_still_there() or file.is_replaced() for file in self.read)


class HeaderLists(Protocol):
    """Lists of the headers of compiles, for machines that have only borrowed the compiler. `asked` identifies a compile."""

    def get(self, compiler: str, asked: Sequence[str]) -> bytes | None: ...

    def offer(self, compiler: str, asked: Sequence[str], content: bytes) -> None: ...


def inputs_of(
    commands: Sequence[Sequence[str]],
    sources: Sequence[str],
    directory: Path,
    local_dir: Path,
    names_places: bool = False,
    lists: HeaderLists | None = None,
) -> Inputs:
    """The inputs of `commands`, which run in `directory`. `names_places`: their outputs hold the paths of sources and headers.

    Raises OSError and `subprocess.SubprocessError` if a compiler or a file is missing, or a source includes what is not there.
    Raises ValueError for what it does not understand.
    """
    read = {source: _read(str(directory / source)) for source in sources}
    compiles = [command for command in commands if not COMPILES.isdisjoint(command)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = list(threads.map(lambda command: _headers(command, read, directory, local_dir, lists), compiles))
    written = {value for command in commands for flag, value in itertools.pairwise(command) if flag in _WRITES}
    placeless = [list(_with_names_of_compilers(each, directory, local_dir)) for each in commands]
    text = "\n".join(shlex.join(each if names_places else _neutral(each, read, written)) for each in placeless)
    flags = " ".join([text, *_environment.read().values()])
    if _GPU_THAT_IS_HERE.search(flags) or any(map(_is_for_the_gpu_that_is_here, compiles)):
        raise ValueError("code for the GPU that is here")
    files = {file.path: file for file in (*read.values(), *itertools.chain(*found))}
    return Inputs(
        text,
        (*(file.digest for file in read.values()), *map(_digest_of, found)),
        tuple(dict.fromkeys(_tools(commands, sources, written, directory))),
        any(file.is_timed for file in files.values()) or _TIMED.search(text.encode()) is not None,
        "native" in flags,
        tuple(files.values()),
    )


def _is_for_the_gpu_that_is_here(command: Sequence[str]) -> bool:
    return "hipcc" in Path(command[0]).name and not any(argument.startswith(_NAMES_GPU) for argument in command)


def _digest_of(files: Sequence[_File]) -> str:
    return hashlib.sha256("".join(file.digest for file in files).encode()).hexdigest()


def _with_names_of_compilers(command: Sequence[str], directory: Path, local_dir: Path) -> Iterator[str]:
    """The arguments of `command`, with the names of compilers for their paths."""
    for before, argument in itertools.pairwise(("", *command)):
        flag, separator, value = argument.rpartition("=")
        is_one = before in ("", *_HOST_COMPILER) or flag in _HOST_COMPILER or Path(before).name in LAUNCHERS
        yield flag + separator + name_of(value, directory, local_dir) if is_one else argument


def name_of(program: str, directory: Path, local_dir: Path) -> str:
    """The name of a program that runs in `directory`, if it counts by its content; else its path."""
    path = _program(program, directory)
    is_known = fingerprint(path if "/" in path else shutil.which(path) or path, local_dir) is not None
    return Path(program).name if is_known else program


def _program(name: str, directory: Path) -> str:
    """The path of a program that runs in `directory`, or its name on ``PATH``."""
    return str(directory / name) if "/" in name else name


def _neutral(command: Sequence[str], sources: Mapping[str, _File], written: set[str]) -> Iterator[str]:
    """The arguments of `command`, without the directories of sources, headers and outputs."""
    is_include = False
    for argument in command:
        joined = next((flag for flag in _INCLUDES if argument.startswith(flag)), "")
        if is_include or (joined and argument != joined):
            yield joined + _PLACE
        elif argument in sources:
            yield f"{_PLACE}/{Path(argument).name}@{sources[argument].digest}"
        elif argument in written:
            yield f"{_PLACE}/{Path(argument).name}"
        else:
            yield argument
        is_include = argument in _INCLUDES


def _read(path: str) -> _File:
    stamp = stamp_of(os.stat(path))  # noqa: PTH116 - of thousands; taken first: a change during the read gives another
    content = Path(path).read_bytes()
    if _READS_MORE.search(content):
        raise ValueError(f"{path} includes a file by a directive of the assembler")
    return _File(path, stamp, hashlib.sha256(content).hexdigest(), bool(_TIMED.search(content)))


def _headers(
    command: Sequence[str],
    sources: Mapping[str, _File],
    directory: Path,
    local_dir: Path,
    lists: HeaderLists | None,
) -> list[_File]:
    """The headers of one compile, from the machine's cache unless something has changed."""
    compiler = shutil.which(command[0]) or ""
    stamp = str(compiler and stamp_of(os.stat(compiler)))  # noqa: PTH116 - as above
    own = {argument: Path(directory, argument) for argument in command if argument in sources}
    is_alone = all(each.is_absolute() for each in map(Path, _values(command, *_INCLUDES))) and all(
        _is_bare(place.parent, {each.name for each in own.values()}) for place in own.values()
    )
    places = () if is_alone else (str(directory.resolve()), *map(str, own))
    arguments = [own[each].name if each in own else each for each in _read_by(command)]
    name = hashlib.sha256(_environment.token())
    asked = *places, *arguments, *(sources[each].digest for each in own)
    for part in (compiler, stamp, *asked):
        name.update(part.encode("utf-8", "surrogateescape") + b"\0")

    def load(rows: Any) -> list[_File] | None:
        found = [_File(path, (*stamp,), *more) for path, stamp, *more in rows]
        return found if all(file.is_still_there() for file in found) else None

    def compute(_: Any) -> tuple[list[_File], Any]:
        begun = time.time_ns()
        if record.read(compiler):
            listed = lists.get(compiler, asked) if lists is not None else None
            if listed is None:
                raise ValueError(f"{command[0]} is borrowed, and the store has no list of these headers")
            return _from_list(listed), None
        files = [_read(header) for header in dict.fromkeys(_named(command, directory))]
        if lists is not None:
            lists.offer(compiler, asked, _as_list(files, compiler))
        rows = [(file.path, file.stamp, file.digest, file.is_timed) for file in files]
        return files, rows if all(is_settled(file.stamp, begun) for file in files) else None

    return cached(local_dir, f"headers-{name.hexdigest()[:32]}", load, compute)


def _as_list(files: Sequence[_File], compiler: str) -> bytes:
    """The names of `files`, and what is to be known of those that come with the compiler, which may be missing elsewhere."""
    own = tuple(f"{Path(each).parent.parent}/" for each in (compiler, os.path.realpath(compiler)))
    paths = zlib.compress("\0".join(file.path for file in files).encode("utf-8", "surrogateescape"), 9)
    known = [
        (number, bytes.fromhex(file.digest), file.is_timed)
        for number, file in enumerate(files)
        if file.path.startswith(own)
    ]
    return bytes(msgpack.packb([paths, known]))


def _from_list(content: bytes) -> list[_File]:
    """The files as they are here; one that is not here as it is listed. Raises ValueError if it is not, and OSError."""
    try:
        packed, known = msgpack.unpackb(content)
        paths = zlib.decompressobj().decompress(packed, _LONGEST_LIST).decode("utf-8", "surrogateescape").split("\0")
        listed = {paths[number]: _File(paths[number], _NOWHERE, digest.hex(), timed) for number, digest, timed in known}
    except (TypeError, LookupError, AttributeError, zlib.error, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"it is no list of headers: {error}") from None
    return [_read(path) if os.path.lexists(path) else _listed(listed, path) for path in paths]


def _listed(listed: Mapping[str, _File], path: str) -> _File:
    if path not in listed:
        raise ValueError(f"{path} is missing, and does not come with the compiler")
    return listed[path]


def _is_bare(directory: Path, sources: set[str]) -> bool:
    """True if `directory` has no file that a source beside it could include: then it is as good as any other."""
    names = {each.name for each in os.scandir(directory) if not each.name.endswith(_OUTPUTS)}
    return names <= sources | _NINJAS


def _read_by(command: Sequence[str]) -> Iterator[str]:
    """The arguments that say what a compile reads."""
    skipped = False
    for argument in command:
        if not (skipped or argument in _LEFT_OUT or argument in _WRITES):
            yield argument
        skipped = argument in _WRITES and not skipped


def _named(command: Sequence[str], directory: Path) -> Iterator[str]:
    """The files that a compile reads, as the compiler names them; ``-M`` makes it stop before it compiles."""
    rule = output_of([*_read_by(command), "-M"], cwd=directory)
    _, separator, names = rule.replace("\\\n", " ").partition(": ")
    if not separator:
        raise ValueError("the compiler prints no rule of its headers")
    for name in shlex.split(names)[1:]:  # less the source
        yield str((directory / name).resolve())


def _tools(
    commands: Sequence[Sequence[str]], sources: Sequence[str], written: set[str], directory: Path
) -> Iterator[str]:
    """The compilers, with a wrapper such as ccache, and the files that flags name: libraries, plugins, linker scripts.

    Outputs of an earlier build, of these commands, are none of them. Raises ValueError for flags in a file.
    """
    elsewhere = [Path(each) for each in os.environ.get("LIBRARY_PATH", "").split(":") if each]
    for command in commands:
        directories = [Path(value) for value in _values(command, "-L")] + elsewhere
        first = itertools.takewhile(lambda argument: argument == "--" or not argument.startswith("-"), command)
        programs = [each for each in first if each != "--" and each not in sources and each not in written]
        yield from (_program(each, directory) for each in programs)
        yield from _host_compilers(command, directory)
        for argument in command[1:]:
            named = argument.rpartition("=")[2]
            if argument.startswith("@"):
                raise ValueError(f"flags in a file: {argument}")
            if argument.startswith("-l"):
                library = argument[2:]
                names = (library[1:],) if library.startswith(":") else (f"lib{library}.so", f"lib{library}.a")
                yield from (str(d / name) for d in directories for name in names if (d / name).is_file())
            elif named.startswith("/") and named not in written and named not in sources and Path(named).is_file():
                yield named


def _values(command: Sequence[str], *flags: str) -> Iterator[str]:
    """The values of `flags`, in one argument, also behind ``=``, or in the next one."""
    for flag, value in itertools.pairwise((*command, "")):
        if flag in flags:
            yield value
        else:
            yield from (flag.removeprefix(each).removeprefix("=") for each in flags if flag.startswith(each))


def _host_compilers(command: Sequence[str], directory: Path) -> Iterator[str]:
    """The compilers that nvcc, also behind a wrapper, is told to run for the host."""
    named = [*_values(command, *_HOST_COMPILER), os.environ.get("NVCC_CCBIN", "")]
    for place in (_program(each, directory) for each in filter(None, named)):
        yield from (str(each) for each in (Path(place) / "gcc", Path(place) / "g++") if each.is_file())
        if shutil.which(place) and not Path(place).is_dir():
            yield place


def output_of(command: Sequence[str], cwd: Path | None = None) -> str:
    """The standard output of `command`. Raises OSError and `subprocess.SubprocessError`."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=_ENDS, check=True).stdout
