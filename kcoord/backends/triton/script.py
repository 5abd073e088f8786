"""Kernels of a script itself, in a process that does not run it: defined from the script's source, and nothing else of it.

A definition is a top-level ``def``; it brings along the top-level imports, functions and constants that it names. Each must be
bound once. A constant is made of literals, attributes of imported modules, and calls of Triton (``tl.constexpr(4)``,
``triton.Config(…)``). A decorator must be Triton's.
"""

from __future__ import annotations

import ast
import dis
import os
import sys
import types
import warnings
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
_BINDS = ("STORE_NAME", "STORE_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL")
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
        raise Unreplayable(
            f"{qualname} stands in the job's script, which this process does not know: move it into a module that the script "
            "imports"
        )
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
        self._bindings: dict[str, list[ast.stmt]] = {}
        self._read: dict[int, set[str]] = {}
        with warnings.catch_warnings(action="ignore"):  # the script itself has them, once
            self._tree = ast.parse(content, path)
            for statement in self._tree.body:
                bound, self._read[id(statement)] = _globals_of(statement)
                for name in bound:
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
            names += [each for each in self._read[id(statement)] if each in self._bindings and each not in names]
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
        if not isinstance(expression, ast.Name) or expression.id not in self._bindings:
            return False
        return all(_imports_triton(statement, expression.id) for statement in self._bindings[expression.id])


def _imports_triton(statement: ast.stmt, name: str) -> bool:
    """True if `statement` imports `name` from Triton."""
    if isinstance(statement, ast.Import):
        modules = [a.name for a in statement.names if (a.asname or a.name.partition(".")[0]) == name]
    else:
        modules = [statement.module or ""] if isinstance(statement, ast.ImportFrom) and not statement.level else [""]
    return all(module.partition(".")[0] == "triton" for module in modules)


def _globals_of(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """The module's names that a top-level statement binds, and those that it reads, also in the functions that it defines."""
    bound: set[str] = set()
    read: set[str] = set()
    outer = compile(ast.Module([statement], []), "<script>", "exec", dont_inherit=True)
    codes = [outer]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        binds = _BINDS if code is outer else ("STORE_GLOBAL", "DELETE_GLOBAL")
        for each in dis.get_instructions(code):
            if each.opname in binds:
                bound.add(each.argval)
            elif each.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                read.add(each.argval)
    return bound, read
