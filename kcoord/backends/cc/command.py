"""A command line of a host compiler or of nvcc that compiles sources, and links nothing."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kcoord.keys.tools.commands import COMPILES

_SOURCES = (".c", ".cc", ".cpp", ".cxx", ".c++", ".C", ".cu", ".hip", ".m", ".mm", ".i", ".ii")
_SUFFIXES = {"S": ".s", "cubin": ".cubin", "ptx": ".ptx", "fatbin": ".fatbin"}
"""Of outputs without a name; ``.o`` for the others."""
_VALUES = frozenset({
    "-I", "-D", "-U", "-x", "-t", "-include", "-imacros", "-isystem", "-iquote", "-idirafter", "-isysroot", "-arch", "-code",
    "-gencode", "-std", "-ccbin", "-target", "-maxrregcount", "-mllvm", "-Xclang", "-Xcompiler", "-Xptxas", "-Xcudafe",
    "-Xfatbin", "-Xnvlink", "-diag-suppress", "--compiler-options", "--compiler-bindir", "--ptxas-options",
    "--gpu-architecture", "--gpu-code", "--generate-code", "--maxrregcount", "--diag-suppress", "--threads", "--param", "--std",
    "--define-macro", "--undefine-macro", "--include-path", "--pre-include", "--system-include",
})  # fmt: skip
"""Flags whose value is the next argument."""
_NOT_UNDERSTOOD = frozenset({
    "-", "-E", "-M", "-MM", "-MG", "-v", "-###", "-lib", "-run", "-keep", "-da", "-dA", "-dD", "-dH", "-dp", "-dP", "-Q",
    "-fsyntax-only", "--analyze",
})  # fmt: skip
_NOT_UNDERSTOOD_BEGINNINGS = (
    "-MJ", "-Wp,", "-Wa,-a", "-save-temps", "--save-temps", "-gsplit-dwarf", "--coverage", "-coverage", "-ftest-coverage",
    "-fprofile", "-ftime-trace", "-fdump", "-fopt-info", "-fstack-usage", "-fcallgraph-info", "-fmodule", "-emit-",
    "-aux-info", "-specs", "--specs", "-fsave-optimization-record", "-wrapper", "-B", "-keep-", "--keep", "-dryrun",
    "--dryrun", "-time", "--time", "-odir", "--output", "-dlink", "--device-link", "-dump", "-print", "--run", "--lib",
    "-optf", "--options-file", "--preprocess", "--generate-dependen", "--generate-nonsystem", "--dependency",
    "-fdevice-time-trace", "--fdevice-time-trace", "--version", "--help", "--list",
)  # fmt: skip
"""Flags that write files beside the output, print, or read what is not keyed."""
_PASSES_ON = ("-Xcompiler", "-Xclang", "--compiler-options")
"""Flags whose value is a list of flags."""
_OF_THE_ENVIRONMENT = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_RULES_OF_THE_ENVIRONMENT = ("DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES")
_DEPENDENCIES = frozenset({"-MD", "-MMD", "-MP"})
_DEBUG = ("-lineinfo", "--generate-line-info", "-G", "--device-debug")


@dataclass(frozen=True)
class Dependencies:
    """The rule for make that the compile is to write: to `file`, for `targets`, with empty rules for headers if `phony`.

    `kind` is ``-MD``, or ``-MMD``: without the headers of the system.
    """

    kind: str
    file: str
    targets: tuple[str, ...]
    phony: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler's, whatever its output is called."""
        targets = itertools.chain.from_iterable(("-MT", target) for target in self.targets)
        return (self.kind, "-MF", self.file, *targets, *(("-MP",) if self.phony else ()))


@dataclass(frozen=True)
class Command:
    """`canonical` are the commands for each source, without outputs and rules for make."""

    canonical: tuple[tuple[str, ...], ...]
    sources: tuple[str, ...]
    outputs: tuple[str, ...]
    dependencies: Dependencies | None
    names_places: bool
    """The output holds the paths of its sources: it has debug information."""


def understood(line: Sequence[str]) -> Command | None:
    """None for a command that is to run as it is."""
    try:
        arguments = list(_expanded(line[1:]))
        implied = [flag for name in _OF_THE_ENVIRONMENT for flag in shlex.split(os.environ.get(name, ""))]
    except (OSError, ValueError):
        return None
    if any(os.environ.get(name) for name in _RULES_OF_THE_ENVIRONMENT):
        return None
    options: list[str] = []
    sources: list[str] = []
    named: dict[str, list[str]] = {"-o": [], "-MF": [], "-MT": [], "-MQ": []}
    seen: set[str] = set()
    rest = iter(arguments)
    for argument in rest:
        if argument in named or argument in _VALUES:
            value = next(rest, None)
            if value is None:
                return None
            place = named.get(argument)
            if argument == "-x" and sources:  # of the sources that follow
                return None
            if place is None:
                options += [argument, value]
            else:
                place.append(value)
        elif argument in _DEPENDENCIES:
            seen.add(argument)
        elif _is_odd(argument):
            return None
        elif argument.startswith("-"):
            options.append(argument)
        elif argument.endswith(_SOURCES):
            sources.append(argument)
        else:
            return None
    passed = [*implied, *_passed_on([*options, *implied])]
    if any(map(_is_odd, passed)):
        return None
    modes = [option for option in options if option in COMPILES]
    kind = next((each for each in ("-MMD", "-MD") if each in seen), "")
    wants_rule = bool(kind)
    once = len(modes) == 1 and len(named["-o"]) < 2 and len(named["-MF"]) < 2
    apart = len(sources) == 1 or not (named["-o"] or wants_rule)  # else one name for several files
    if not (sources and once and apart) or (not wants_rule and any(named[n] for n in ("-MF", "-MT", "-MQ"))):
        return None
    suffix = _SUFFIXES.get(modes[0].lstrip("-"), ".o")
    outputs = named["-o"] or [Path(source).with_suffix(suffix).name for source in sources]
    if not all(map(_is_a_file_to_be, (*outputs, *named["-MF"]))):
        return None
    targets = (*named["-MT"], *(each.replace("$", "$$") for each in named["-MQ"])) or (outputs[0],)
    file = named["-MF"][0] if named["-MF"] else str(Path(outputs[0]).with_suffix(".d"))
    if wants_rule and not _is_a_file_to_be(file):
        return None
    return Command(
        canonical=tuple((line[0], *options, source) for source in sources),
        sources=tuple(sources),
        outputs=tuple(outputs),
        dependencies=Dependencies(kind, file, tuple(targets), "-MP" in seen) if wants_rule else None,
        names_places=any(option in _DEBUG or _is_debug(option) for option in (*options, *passed)),
    )


def _is_odd(argument: str) -> bool:
    joins_value = argument[:2] == "-o" or argument[:3] in ("-MF", "-MT", "-MQ")
    return joins_value or argument in _NOT_UNDERSTOOD or argument.startswith(_NOT_UNDERSTOOD_BEGINNINGS)


def _passed_on(options: Sequence[str]) -> Iterator[str]:
    """The flags that other flags hold for another program."""
    for flag, value in itertools.pairwise((*options, "")):
        for name in _PASSES_ON:
            if flag == name or flag.startswith(f"{name}="):
                yield from (value if flag == name else flag.partition("=")[2]).split(",")


def _is_a_file_to_be(name: str) -> bool:
    """False for a device, a pipe or a directory, and for what a compiler takes for its output stream."""
    path = Path(name)
    return name != "-" and not path.is_relative_to("/dev") and (path.is_file() or not path.exists())


def _is_debug(option: str) -> bool:
    return option.startswith("-g") and not option.startswith(("-g0", "-gencode", "-gpu"))


def _expanded(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments, with those in response files. Raises ValueError for a file that names another, OSError for a missing one."""
    for argument in arguments:
        if not argument.startswith("@"):
            yield argument
            continue
        inner = shlex.split(Path(argument[1:]).read_text())
        if any(each.startswith("@") for each in inner):
            raise ValueError(f"{argument} names another file of arguments")
        yield from inner
