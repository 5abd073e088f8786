"""A command line of a host compiler or of nvcc that compiles one source, and links nothing."""

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
"""Suffixes of outputs without a name, by mode; ``.o`` for other modes."""
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
        """The compiler's flags for this rule. They do not depend on the output's name."""
        targets = itertools.chain.from_iterable(("-MT", target) for target in self.targets)
        return (self.kind, "-MF", self.file, *targets, *(("-MP",) if self.phony else ()))


@dataclass(frozen=True)
class Command:
    """`canonical` is the command without its output and its rule for make."""

    canonical: tuple[str, ...]
    source: str
    output: str
    dependencies: Dependencies | None
    names_places: bool
    """The output holds the path of its source: it has debug information."""


def understood(line: Sequence[str]) -> Command | None:
    """None for a command that is to run as it is."""
    try:
        implied = [flag for name in _OF_THE_ENVIRONMENT for flag in shlex.split(os.environ.get(name, ""))]
    except ValueError:
        return None
    if any(os.environ.get(name) for name in _RULES_OF_THE_ENVIRONMENT):
        return None
    options: list[str] = []
    sources: list[str] = []
    named: dict[str, list[str]] = {"-o": [], "-MF": [], "-MT": [], "-MQ": []}
    seen: set[str] = set()
    rest = iter(line[1:])
    for argument in rest:
        if argument in named or argument in _VALUES:
            value = next(rest, None)
            if value is None or (argument == "-x" and sources):  # of the sources that follow
                return None
            if argument in named:
                named[argument].append(value)
            else:
                options += [argument, value]
        elif argument in _DEPENDENCIES:
            seen.add(argument)
        elif argument.endswith(_SOURCES) and not argument.startswith(("-", "@")):
            sources.append(argument)
        elif argument.startswith("-") and not _is_odd(argument):
            options.append(argument)
        else:
            return None
    passed = [*implied, *_passed_on([*options, *implied])]
    modes = [option for option in options if option in COMPILES]
    once = len(sources) == len(modes) == 1 and len(named["-o"]) < 2 and len(named["-MF"]) < 2
    if not once or any(map(_is_odd, passed)):
        return None
    output = (
        named["-o"][0]
        if named["-o"]
        else str(Path(sources[0]).with_suffix(_SUFFIXES.get(modes[0].lstrip("-"), ".o")).name)
    )
    kind = next((each for each in ("-MMD", "-MD") if each in seen), "")
    rule = None
    if kind:
        targets = (*named["-MT"], *(each.replace("$", "$$") for each in named["-MQ"])) or (output,)
        file = named["-MF"][0] if named["-MF"] else str(Path(output).with_suffix(".d"))
        rule = Dependencies(kind, file, targets, "-MP" in seen)
    elif named["-MF"] or named["-MT"] or named["-MQ"]:
        return None
    if not all(map(_is_a_file_to_be, (output, rule.file) if rule else (output,))):
        return None
    return Command(
        canonical=(line[0], *options, sources[0]),
        source=sources[0],
        output=output,
        dependencies=rule,
        names_places=any(option in _DEBUG or _is_debug(option) for option in (*options, *passed)),
    )


def _is_odd(argument: str) -> bool:
    joins_value = argument[:2] == "-o" or argument[:3] in ("-MF", "-MT", "-MQ")
    return joins_value or argument in _NOT_UNDERSTOOD or argument.startswith(_NOT_UNDERSTOOD_BEGINNINGS)


def _passed_on(options: Sequence[str]) -> Iterator[str]:
    """Splits flags that are passed through, as in ``-Xcompiler -O2,-g``."""
    for flag, value in itertools.pairwise((*options, "")):
        for name in _PASSES_ON:
            if flag == name or flag.startswith(f"{name}="):
                yield from (value if flag == name else flag.partition("=")[2]).split(",")


def _is_a_file_to_be(name: str) -> bool:
    """False for ``-`` (stdout), a device, a pipe or a directory."""
    path = Path(name)
    return name != "-" and not path.is_relative_to("/dev") and (path.is_file() or not path.exists())


def _is_debug(option: str) -> bool:
    return option.startswith("-g") and not option.startswith(("-g0", "-gencode", "-gpu"))
