"""Headers that a kernel's own code (``T.import_source``) includes: they lie in directories that are keyed, or nobody shares it.

The directories are TileLang's templates, and those of the kernel's flags, whose headers are followed to what they include.
The standard library and CUDA's own headers count as the compilers'.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from kcoord.backends.tilelang.request import Kernel
from kcoord.errors import KeyFactorError

_DEVICE_FLAGS = "tl.device_compile_flags"
_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_DIRECTORIES = (
    "-isystem", "-iquote", "-idirafter", "--include-path", "--include-directory", "--system-include", "-I",
)  # fmt: skip
_FILES = re.compile(r"-i|--include|--imacros|--pre-include|--options-file|-optf|@")
"""Flags of a file that is read, or of another place to look for headers."""
_NAMES_PATH = re.compile(r"(?!-[DU]).*(?:/|[=,]-[iI])")
_GAP = r"(?:[ \t]|/\*.*?\*/)*"
_DIRECTIVE = re.compile(
    rf"^(?![ \t]*//).*?(?:#|%:){_GAP}(?:include(?:_next)?|import|embed)\b{_GAP}(?:\"([^\"\n]+)\"|<([^>\n]+)>|([^\n]*))",
    re.MULTILINE,
)
_STANDARD = re.compile(r"\w+|(?:assert|float|inttypes|limits|math|stdbool|stddef|stdint|stdio|stdlib|string)\.h")
"""Headers of C++ have no suffix."""


def directories(request: Kernel) -> list[str]:
    """Those that the flags name. Raises `KeyFactorError` for flags that no shell splits."""
    return [*_parsed(_flags(request))[0], *_parsed(_variables(request))[0]]


def problem(request: Kernel, trees: Collection[str], callbacks: Any) -> str:
    """Why the headers cannot be in a key; empty if they are, in `trees`. `callbacks` is the content of those that write code.

    Raises `KeyFactorError` as `directories` does.
    """
    if relative := next((tree for tree in trees if not os.path.isabs(tree)), None):  # noqa: PTH117 - "" is none
        return f"-I{relative} is relative"
    words, inherited = _parsed(_flags(request))[1], _parsed(_variables(request))[1]
    for word in (*words, *inherited):
        if _FILES.match(word) or (word in words and _NAMES_PATH.match(word)):
            return f"{word} names a file that its key does not hold"
    try:
        return _unkeyed([*_code(request.function), *_strings(callbacks)], request, trees)
    except OSError as error:
        return f"what its code includes cannot be read: {error}"


def _unkeyed(code: list[str], request: Kernel, trees: Collection[str]) -> str:
    own = [Path(each) for each in directories(request)]
    places = [*map(Path, trees), *_of_packages()]
    todo: list[tuple[str, Path | None]] = [(each, None) for each in code]
    seen: set[Path] = set()
    while todo:
        text, header = todo.pop()
        if ".incbin" in text:
            return "its code has .incbin, whose file its key does not hold"
        for quoted, angled, macro in _DIRECTIVE.findall(text.replace("\\\n", "")):
            name = quoted or angled
            if not name:
                return f"it includes {macro.strip() or 'nothing'}, which is no file's name"
            beside = [header.parent] if header and quoted else []
            found = {place: place / name for place in (*beside, *places) if (place / name).is_file()}
            if not found and header is None and (quoted or not _STANDARD.fullmatch(name)):
                return f"it includes {name}, which lies in no directory of its flags"
            for place, file in found.items():
                if not _is_held(file, name, places):
                    return f"it includes {file}, which its key does not hold"
                if (place in own or place in beside) and file not in seen:
                    seen.add(file)
                    todo.append((file.read_text(errors="replace"), file))
    return ""


def _is_held(file: Path, name: str, places: list[Path]) -> bool:
    """False for a file outside of `places`, or in a hidden directory, which a key leaves out."""
    parts = Path(name).parts
    if not any(part.startswith((".", "/")) for part in parts):
        return True
    real = file.resolve()
    below = [real.relative_to(place) for place in map(Path.resolve, places) if real.is_relative_to(place)]
    return any(not any(part.startswith(".") for part in path.parts) for path in below)


def _of_packages() -> Iterator[Path]:
    """Directories of headers whose packages are in each key: TileLang's CUTLASS, and CUDA's, by its compiler."""
    from tilelang.env import CUDA_HOME, CUTLASS_INCLUDE_DIR

    yield Path(CUTLASS_INCLUDE_DIR)
    if CUDA_HOME:
        yield from Path(CUDA_HOME).glob("targets/*/include")


def _code(function: Any) -> Iterator[str]:
    """The strings of the IR, code among them. Its text has them in escapes."""
    import tvm

    return _strings(json.loads(str(tvm.ir.save_json(function))))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


def _flags(request: Kernel) -> list[str]:
    """Words of the kernel's flags, and of those for the device, as TileLang splits them."""
    configs = {getattr(name, "value", name): value for name, value in (request.pass_configs or {}).items()}
    given: list[Any] = []
    for flags in (request.flags or (), configs.get(_DEVICE_FLAGS) or ()):
        given += [flags] if isinstance(flags, str) else flags
    if request.execution == "cython":
        return [word for flag in given for word in str(flag).split()]
    return [word for flag in given for word in _split(str(flag))]


def _variables(request: Kernel) -> list[str]:
    if request.target.kind.name != "cuda":
        return []
    return [word for name in _VARIABLES for word in _split(os.environ.get(name, ""))]


def _split(flag: str) -> list[str]:
    try:
        return shlex.split(flag)
    except ValueError as error:
        raise KeyFactorError(f"{flag}: {error}") from None


def _parsed(words: list[str]) -> tuple[list[str], list[str]]:
    """The directories, which are in the same word as their flag or in the next one, and the other words."""
    found: list[str] = []
    others: list[str] = []
    left = iter(words)
    for word in left:
        flag = next((each for each in _DIRECTORIES if word.startswith(each)), None)
        if flag is None:
            others.append(word)
        else:
            found.append(word.removeprefix(flag).lstrip("=") or next(left, ""))
    return found, others
