"""A command line of a host compiler or of nvcc that compiles sources, and links nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kcoord.keys.tools.commands import COMPILES

_SOURCES = (".c", ".cc", ".cpp", ".cxx", ".c++", ".C", ".cu", ".hip", ".m", ".mm", ".i", ".ii", ".s", ".S")
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
_NOT_UNDERSTOOD = frozenset({"-", "-E", "-M", "-MM", "-MG", "-v", "-###", "-lib", "-run", "-keep"})
_NOT_UNDERSTOOD_BEGINNINGS = (
    "-MJ", "-Wp,", "-Wa,-a", "-save-temps", "--save-temps", "-gsplit-dwarf", "--coverage", "-coverage", "-ftest-coverage",
    "-fprofile", "-ftime-trace", "-fdump", "-fstack-usage", "-fcallgraph-info", "-fmodule", "-emit-", "-aux-info", "-specs",
    "--specs", "-wrapper", "-B", "-keep-", "--keep", "-dryrun", "--dryrun", "-time", "--time", "-odir", "--output", "-dlink",
    "--device-link", "-dump", "-print", "--run", "--lib", "-optf", "--options-file", "--preprocess", "--generate-dependen",
    "--generate-nonsystem", "--dependency", "-fdevice-time-trace", "--fdevice-time-trace", "--version", "--help", "--list",
)  # fmt: skip
"""Flags that write files beside the output, print, or read what is not keyed."""
_DEPENDENCIES = frozenset({"-MD", "-MMD", "-MP"})
_DEBUG = ("-lineinfo", "--generate-line-info", "-G", "--device-debug")


@dataclass(frozen=True)
class Dependencies:
    """The rule for make that the compile is to write: to `file`, for `targets`, with empty rules for headers if `phony`."""

    file: str
    targets: tuple[str, ...]
    phony: bool


@dataclass(frozen=True)
class Command:
    """`line` is what the user typed. `canonical` are the commands for each source, without names of outputs."""

    line: tuple[str, ...]
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
    except (OSError, ValueError):
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
    modes = [option for option in options if option in COMPILES]
    wants_rule = not seen.isdisjoint({"-MD", "-MMD"})
    once = len(modes) == 1 and len(named["-o"]) < 2 and len(named["-MF"]) < 2
    apart = len(sources) == 1 or not (named["-o"] or wants_rule)  # else one name for several files
    if not (sources and once and apart) or (not wants_rule and any(named[n] for n in ("-MF", "-MT", "-MQ"))):
        return None
    suffix = _SUFFIXES.get(modes[0].lstrip("-"), ".o")
    outputs = named["-o"] or [Path(source).with_suffix(suffix).name for source in sources]
    targets = (*named["-MT"], *(each.replace("$", "$$") for each in named["-MQ"])) or (outputs[0],)
    file = named["-MF"][0] if named["-MF"] else str(Path(outputs[0]).with_suffix(".d"))
    return Command(
        line=tuple(line),
        canonical=tuple((line[0], *options, source) for source in sources),
        sources=tuple(sources),
        outputs=tuple(outputs),
        dependencies=Dependencies(file, tuple(targets), "-MP" in seen) if wants_rule else None,
        names_places=any(option in _DEBUG or _is_debug(option) for option in options),
    )


def _is_odd(argument: str) -> bool:
    joins_value = argument[:2] == "-o" or argument[:3] in ("-MF", "-MT", "-MQ")
    return joins_value or argument in _NOT_UNDERSTOOD or argument.startswith(_NOT_UNDERSTOOD_BEGINNINGS)


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
