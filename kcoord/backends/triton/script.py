"""Kernels of a script itself, in a process that does not run it: defined from the script's source, and nothing else of it.

A definition is a top-level ``def``; it brings along the top-level imports, functions and constants that it names. Each must be
bound once. A constant is made of literals, attributes of imported modules, and calls of Triton (``tl.constexpr(4)``,
``triton.Config(…)``). A decorator must be Triton's.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kcoord.errors import KcoordError
from kcoord.ranks import POOL_SCRIPT

_CALLED = (
    "range", "len", "min", "max", "int", "float", "bool", "str", "list", "tuple", "dict", "sorted", "zip", "enumerate",
)  # fmt: skip
_PARTS = (
    ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Name,
    ast.Attribute, ast.Subscript, ast.Slice, ast.Starred, ast.Call, ast.keyword, ast.ListComp, ast.GeneratorExp, ast.DictComp,
    ast.comprehension, ast.Lambda, ast.arguments, ast.arg, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context,
)  # fmt: skip
_LARGEST = 4 << 20  # bytes of a script

_defined: dict[tuple[str, int], _Script] = {}


class Unreplayable(KcoordError):
    """A recipe that does not lead to a kernel here. The message says why."""


def kernel_of_script(qualname: str) -> Any:
    """The object at `qualname` of the script for which this pool was started. Raises `Unreplayable`, and what an import raises.

    From then on the script is this process's ``__main__``, as far as it is defined.
    """
    path = os.environ.get(POOL_SCRIPT)
    if not path:
        raise Unreplayable(f"{qualname} is the script's own, and this process knows no script")
    try:
        changed = Path(path).stat().st_mtime_ns
        script = _defined.get((path, changed)) or _Script(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise Unreplayable(f"{qualname} cannot be read in {path}: {error}") from error
    _defined[path, changed] = script
    return script.define(qualname)


class _Script:
    def __init__(self, path: str) -> None:
        """Raises OSError, SyntaxError and ValueError."""
        with Path(path).open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ValueError("it is too large")
        self._path = path
        self._tree = ast.parse(content, path)
        self._bindings: dict[str, list[ast.stmt]] = {}
        for statement in self._tree.body:
            for name in _bound(statement):
                self._bindings.setdefault(name, []).append(statement)
        self._module = types.ModuleType("__main__")
        self._module.__file__ = path
        self._done: set[int] = set()

    def define(self, qualname: str) -> Any:
        if qualname not in vars(self._module):
            needed = self._needed(qualname)
            futures = [s for s in self._tree.body if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
            chosen = [s for s in self._tree.body if id(s) in needed and s not in futures]
            body = ast.Module([*futures, *(s for s in chosen if id(s) not in self._done)], [])
            sys.modules["__main__"] = self._module
            exec(compile(body, self._path, "exec", dont_inherit=True), vars(self._module))
            self._done |= needed
        return vars(self._module)[qualname]

    def _needed(self, qualname: str) -> set[int]:
        """The statements that define `qualname`, by their ids. Raises `Unreplayable` for one that is not to be run."""
        found: set[int] = set()
        names = [qualname]
        while names:
            name = names.pop()
            statements = self._bindings.get(name, [])
            if len(statements) != 1:
                raise Unreplayable(f"{qualname} cannot be defined alone: {name} is bound {len(statements)} times")
            (statement,) = statements
            if id(statement) in found:
                continue
            found.add(id(statement))
            if not self._is_harmless(statement):
                raise Unreplayable(f"{qualname} cannot be defined alone: {name} is made by code of the script")
            names += [each for each in _names_in(statement) if each in self._bindings and each not in names]
        return found

    def _is_harmless(self, statement: ast.stmt) -> bool:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            return True
        if isinstance(statement, ast.FunctionDef):
            defaults = [*statement.args.defaults, *(each for each in statement.args.kw_defaults if each is not None)]
            called = [each.func if isinstance(each, ast.Call) else each for each in statement.decorator_list]
            return all(map(self._is_of_triton, called)) and all(
                map(self._is_constant, [*defaults, *statement.decorator_list])
            )
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            return statement.value is not None and self._is_constant(statement.value)
        return False

    def _is_constant(self, value: ast.expr) -> bool:
        return all(
            isinstance(part, _PARTS) and (not isinstance(part, ast.Call) or self._may_be_called(part.func))
            for part in ast.walk(value)
        )

    def _may_be_called(self, function: ast.expr) -> bool:
        if isinstance(function, ast.Name) and function.id not in self._bindings:
            return function.id in _CALLED
        return self._is_of_triton(function)

    def _is_of_triton(self, expression: ast.expr) -> bool:
        """True for ``triton.jit``, ``tl.constexpr``, ``jit`` that was imported from triton, and the like."""
        while isinstance(expression, ast.Attribute):
            expression = expression.value
        if not isinstance(expression, ast.Name):
            return False
        for statement in self._bindings.get(expression.id, []):
            if isinstance(statement, ast.Import):
                modules = [
                    each.name
                    for each in statement.names
                    if (each.asname or each.name.partition(".")[0]) == expression.id
                ]
            elif isinstance(statement, ast.ImportFrom) and not statement.level:
                modules = [statement.module or ""]
            else:
                return False
            if any(module.partition(".")[0] != "triton" for module in modules):
                return False
        return expression.id in self._bindings


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement binds; names bound in a nested one count, too, and are no plain definition then."""
    for node in ast.walk(statement) if not isinstance(statement, ast.FunctionDef) else (statement,):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (each.asname or each.name.partition(".")[0] for each in node.names)
    if isinstance(statement, ast.FunctionDef):
        yield from (name for node in ast.walk(statement) if isinstance(node, ast.Global) for name in node.names)


def _names_in(statement: ast.stmt) -> set[str]:
    """The names that a statement reads, without builtins, parameters and locals."""
    if isinstance(statement, ast.FunctionDef):
        outside = [*statement.decorator_list, *statement.args.defaults, *filter(None, statement.args.kw_defaults)]
        outside += [
            node.annotation for node in ast.walk(statement.args) if isinstance(node, ast.arg) and node.annotation
        ]
        own = {node.arg for node in ast.walk(statement.args) if isinstance(node, ast.arg)}
        inside = _loaded(statement.body) - own - _stored(statement.body)
        return (inside | _loaded(outside)) - set(vars(builtins))
    return _loaded([statement]) - _stored([statement]) - set(vars(builtins))


def _loaded(nodes: Sequence[ast.AST]) -> set[str]:
    return {name.id for name in _names(nodes) if isinstance(name.ctx, ast.Load)}


def _stored(nodes: Sequence[ast.AST]) -> set[str]:
    return {name.id for name in _names(nodes) if not isinstance(name.ctx, ast.Load)}


def _names(nodes: Sequence[ast.AST]) -> Iterator[ast.Name]:
    return (part for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name))
