"""The text of a file, and whether it is that of the code that runs.

Text is the better identity of code: it is equal under every version of Python, and holds decorators and class bodies, too. But a
file may have been edited after it was imported, a worker may have another version of it than the driver that sent a function,
and a test runner may rewrite an assertion. So a text is compiled again, whole, and compared with the code that runs.
"""

from __future__ import annotations
import __future__

import ast
import functools
import hashlib
import os
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

from kcoord.keys.function.definitions import segment

_IMPORT = re.compile(
    r"import(?:_module[ \t]*\(\s*[rRuU]?[\"']([\w.]+)[\"']|__[ \t]*\(\s*[rRuU]?[\"']([\w.]+)[\"']"
    r"|\b[ \t]*(\((?:[^()#]|#[^\n]*)*\)|[^\n;#]*))"
)  # begins with the word, which is searched for quickly
_FROM = re.compile(r"\bfrom\b[ \t]*(\.*)[ \t]*([\w.]*)[ \t]*$")
_LONGEST_NAME = 300
_LOOKS_AROUND = (b"environ", b"getenv", b"expandvars", b"import_module", b"__import__")
_ATTRIBUTE = re.compile(rb"[.\"']([A-Za-z_]\w*)")
_COMMENT = re.compile(r"#[^\n]*")

_FUTURES = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
_FLAGS = 0x1FFFF
"""Those of a code object that affect how it runs; the others say how it was compiled."""

Import = tuple[str, tuple[str, ...]]
"""A module's name, with leading dots if it is relative, and the names that are taken from it."""


class Source:
    """A file as it was read, without its content: a rank may reach thousands. An extension module has neither codes nor imports.

    `imports` is all that looks like an import statement, anywhere in the text: also in branches and functions, and in prose.
    `looks_around`: it may read the environment, or import by a computed name.
    """

    def __init__(self, path: str, stamp: tuple[int, ...]) -> None:
        """Raises OSError."""
        self.path, self.stamp = path, stamp
        self.is_text = not path.endswith(tuple(EXTENSION_SUFFIXES))
        self.imports: tuple[Import, ...] = ()
        self.looks_around = False
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - of thousands
            if self.is_text:
                data = file.read()
                self.digest = hashlib.sha256(data).hexdigest()
                self.imports, self.looks_around = _imports(data), any(word in data for word in _LOOKS_AROUND)
            else:
                self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._codes: dict[int, dict[tuple[str, int], list[types.CodeType]]] = {}

    @property
    def data(self) -> bytes:
        """The content; nothing if the file is another one by now."""
        with suppress(OSError), open(self.path, "rb", buffering=0) as file:  # noqa: PTH123 - as above
            data = file.read()
            if hashlib.sha256(data).hexdigest() == self.digest:
                return data
        return b""

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")

    @property
    def attributes(self) -> frozenset[str]:
        """All that looks like an attribute's name, or a text that may be one."""
        return frozenset(name.decode() for name in _ATTRIBUTE.findall(self.data))

    def holds(self, code: types.CodeType) -> bool:
        """True if the text compiles to `code`, at the same place."""
        return any(code == each for each in self._beginning_where(code))

    def place_of(self, code: types.CodeType) -> dict[str, int]:
        """The place of a function that the file `holds`: its first line, and its number among those that begin there."""
        number = next(n for n, each in enumerate(self._beginning_where(code)) if each == code)
        return {"first line": code.co_firstlineno} | ({"number": number} if number else {})

    @property
    def codes(self) -> tuple[types.CodeType, ...]:
        """All code of the file, that of the module first; none if it does not compile."""
        return self._compiled(0)

    def _beginning_where(self, code: types.CodeType) -> list[types.CodeType]:
        """Code of the same name and first line. A runner that executes a text lends it its own ``from __future__ import``."""
        futures = code.co_flags & _FUTURES
        if futures not in self._codes:
            places = self._codes[futures] = {}
            for each in self._compiled(futures):
                places.setdefault((each.co_qualname, each.co_firstlineno), []).append(each)
        return self._codes[futures].get((code.co_qualname, code.co_firstlineno), [])

    def _compiled(self, futures: int) -> tuple[types.CodeType, ...]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return tuple(_with_inner(compile(self.data, self.path, "exec", futures, dont_inherit=True)))
        except (SyntaxError, ValueError, RecursionError):
            return ()

    def text_of(self, code: types.CodeType) -> str | None:
        """The text of a function that the file `holds`, from ``def`` or ``lambda`` on: decorators are functions of their own."""
        return self._texts.get((code.co_name, code.co_firstlineno, *_body_of(code).values()))

    @cached_property
    def _texts(self) -> dict[tuple[Any, ...], str]:
        """By name and first line; those of lambdas by the place of the body, too."""
        data, found = self.data, {}
        lines = data.splitlines(keepends=True)
        for node in ast.walk(ast.parse(data)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                where: tuple[Any, ...] = node.name, min([node.lineno, *(each.lineno for each in node.decorator_list)])
            elif isinstance(node, ast.Lambda):
                where = "<lambda>", node.lineno, node.body.lineno, node.body.col_offset
            else:
                continue
            end = node.end_lineno or 0, node.end_col_offset or 0
            found[where] = textwrap.dedent(
                segment(lines, (node.lineno, node.col_offset), end).decode("utf-8", "replace")
            )
        return found


_sources: dict[str, Source] = {}


def source_at(path: str) -> Source | None:
    """The file at `path` as it is now; None if it cannot be read. An unchanged one is not read again."""
    try:
        found = os.stat(path)  # noqa: PTH116 - of thousands
        known = _sources.get(path)
        if known is not None and known.stamp == _stamp_of(found):
            return known
        _sources[path] = Source(path, _stamp_of(found))
    except (OSError, ValueError):
        return None
    return _sources[path]


def _imports(data: bytes) -> tuple[Import, ...]:
    text = data.decode("utf-8", "replace")
    text = re.sub(r"\\\r?\n", " ", text) if "\\" in text else text
    found: dict[Import, None] = {}
    for match in _IMPORT.finditer(text):
        module, dunder, names = match.groups()
        begin = match.start()
        before = _FROM.search(text, max(begin - _LONGEST_NAME, text.rfind("\n", 0, begin) + 1), begin)
        listed = [each.split() for each in _COMMENT.sub("", names or "").strip("() \t").split(",")]
        first = tuple(words[0] for words in listed if words)
        if module or dunder:
            found[module or dunder, ()] = None
        elif before is not None:
            found["".join(before.groups()), first] = None
        else:
            found.update(dict.fromkeys((each, ()) for each in first))
    return tuple(found)


def _stamp_of(found: os.stat_result) -> tuple[int, ...]:
    """It shows that a file changed. The times in ns are last."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def source_of(code: types.CodeType) -> tuple[Any, ...]:
    """``("source", text)`` of a function, or its `bytecode` if no file holds it."""
    source = source_at(code.co_filename)
    text = source.text_of(code) if source is not None and source.holds(code) else None
    return bytecode(code) if text is None else ("source", text)


def _body_of(code: types.CodeType) -> dict[str, int]:
    """The place of a lambda's body, if it has one in this version of Python; nothing for a function with a name."""
    if code.co_name != "<lambda>":
        return {}
    places = ((line, column) for line, _, column, _ in code.co_positions() if line and column)
    return dict(zip(("line", "column"), next(places, ()), strict=False))


def bytecode(code: types.CodeType) -> tuple[Any, ...]:
    """The code of a function without a file, and the version of Python that it belongs to."""
    return ("bytecode", list(sys.version_info[:2]), _plain(code))


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


@functools.lru_cache(maxsize=1024)
def _plain(code: types.CodeType) -> tuple[Any, ...]:
    """The parts of `code` that affect its behaviour: no file name, no line numbers."""
    return (
        code.co_code,
        code.co_exceptiontable,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & _FLAGS),
        tuple(_constant(c) for c in code.co_consts),
    )


def _constant(constant: Any) -> Any:
    """A constant with its type, because ``1 == 1.0 == True``."""
    if isinstance(constant, types.CodeType):
        return ("code", constant.co_name, _plain(constant))
    if isinstance(constant, tuple):
        return ("tuple", tuple(_constant(c) for c in constant))
    if constant is ...:
        return ("...",)
    if isinstance(constant, frozenset):
        return ("frozenset", frozenset(_constant(c) for c in constant))
    if isinstance(constant, (float, complex)):
        return (type(constant).__name__, repr(constant))  # -0.0 and 0.0 are equal, and nan is not
    return (type(constant).__name__, constant)
