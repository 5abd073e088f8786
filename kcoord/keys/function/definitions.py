"""The definitions of a module's text, by which an edit is named: ``helper changed (line 12)``."""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Iterator

MODULE = "<module>"
MOST = 200

_Place = tuple[int, int]
"""A line, from 1, and a column in bytes."""


def definitions_of(text: str) -> dict[str, str]:
    """By name, each definition's line and the first 8 hex digits of its text's SHA-256: ``{"Config.tile": "12:3fa9c1d2"}``.

    Definitions are functions and classes of the module, their methods and nested classes, and module-level names that are set by
    ``NAME = …``. A class's own text is that without its methods and nested classes. ``<module>`` is all other statements, and
    definitions beyond `MOST`. Decorators belong to a text, comments between statements to none. A name that is defined twice has
    the line of the first, and the digest of both. A text that does not parse gives ``{}``. About 2 ms for 500 lines.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the module's import shows them
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    lines = text.encode().splitlines(keepends=True)  # as Python counts them: a str is split at other characters, too
    found: dict[str, tuple[int, list[bytes]]] = {}
    for name, node, begin, end in _parts(tree.body):
        known = name if name in found or name == MODULE or len(found) < MOST - (MODULE not in found) else MODULE
        found.setdefault(known, (node.lineno, []))[1].append(segment(lines, begin, end))
    return {name: f"{line}:{hashlib.sha256(b''.join(parts)).hexdigest()[:8]}" for name, (line, parts) in found.items()}


def _parts(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, ast.stmt, _Place, _Place]]:
    """The texts of a module's or a class's statements: the name that each belongs to, and where it begins and ends."""
    for node in body:
        end = node.end_lineno or 0, node.end_col_offset or 0
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield _within(owner, node.name), node, _begin(node), end
        elif isinstance(node, ast.ClassDef):
            name = _within(owner, node.name)
            yield name, node, _begin(node), _begin(node.body[0])
            yield from _parts(node.body, name)
        else:
            yield owner or _assigned(node) or MODULE, node, _begin(node), end


def _within(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def _assigned(node: ast.stmt) -> str:
    """``NAME`` of ``NAME = …`` and ``NAME: int = …``."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""


def _begin(node: ast.stmt) -> _Place:
    decorators = getattr(node, "decorator_list", None)
    first = decorators[0] if decorators else node
    return first.lineno, first.col_offset


def segment(lines: list[bytes], begin: _Place, end: _Place) -> bytes:
    """The text from `begin` to `end`, without white space at its end."""
    (first, left), (last, right) = begin, end
    if first == last:
        return lines[first - 1][left:right]
    return b"".join([lines[first - 1][left:], *lines[first : last - 1], lines[last - 1][:right]]).rstrip()
