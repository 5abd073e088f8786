"""The identity of a function's code: its source text if that is what runs, else its bytecode.

Source text is the better identity, because it is equal under every version of Python. But a file may have been edited
after it was imported, two lambdas may share a line, and a test runner may rewrite an assertion. The text is therefore
compiled again and compared with the code that runs; a text that differs is not used.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import inspect
import linecache
import sys
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from kcoord.keys.function.reads import global_name, instructions, is_method_load

_FUTURES = functools.reduce(int.__or__, (getattr(__future__, n).compiler_flag for n in __future__.all_feature_names))
_NESTED = inspect.CO_NESTED
_QUALNAMES_ARE_CONSTANTS = sys.version_info < (3, 11)


class _Itself:
    """A code object by its identity: codes of two texts are equal if these differ in annotations or comments alone."""

    __slots__ = ("code",)

    def __init__(self, code: types.CodeType) -> None:
        self.code = code

    def __hash__(self) -> int:
        return id(self.code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.code is other.code


def source_of(code: types.CodeType, qualname: str) -> tuple[Any, ...]:
    """``("source", text)``, or ``("bytecode", …)`` with the version of Python that it belongs to.

    The text is dedented and begins at ``def`` or ``lambda``: decorators are functions of their own. Costs about half a
    millisecond for a function of 30 lines, once per process.
    """
    return _source_of(_Itself(code), qualname)


@functools.lru_cache(maxsize=4096)
def _source_of(itself: _Itself, qualname: str) -> tuple[Any, ...]:
    code = itself.code
    text = _verified_text(code, qualname)
    optimize = (("optimize", sys.flags.optimize),) if sys.flags.optimize else ()  # -O drops assertions
    if text is not None:
        return ("source", text, *optimize)
    return ("bytecode", list(sys.version_info[:2]), _plain(code), *optimize)


def _verified_text(code: types.CodeType, qualname: str) -> str | None:
    try:
        linecache.checkcache(code.co_filename)
        lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
        text = textwrap.dedent("".join(inspect.getblock(lines)))  # `inspect.getsource` would search all modules, for ms
        tree = ast.parse(text)
    except (SyntaxError, ValueError, IndexError):
        return None  # no file, or a lambda in the middle of an expression
    wanted = _plain(code)
    for node in ast.walk(tree):
        if _is_candidate(node, code.co_name):
            segment = ast.get_source_segment(text, node)
            if segment and any(_plain(c) == wanted for c in _compiled(node, code, qualname)):
                return textwrap.dedent(segment)
    return None


def _is_candidate(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Lambda):
        return name == "<lambda>"
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name


def _compiled(node: ast.AST, code: types.CodeType, qualname: str) -> Iterator[types.CodeType]:
    """The code objects of `code`'s name that `node` compiles to, with the same free variables and name mangling."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        node.decorator_list = []
        statement: ast.stmt = node
    elif isinstance(node, ast.expr):
        statement = ast.Expr(node)
    else:
        return
    free = [n for n in code.co_freevars if n != "__class__"]
    outer = ast.parse(f"def _outer({', '.join(free)}): pass")
    owner = qualname.split(".")[-2:-1]
    if owner and owner[0].isidentifier():
        around = ast.parse(f"class {owner[0]}: pass").body[0]
        around.body = [statement]  # type: ignore[attr-defined]
        statement = around
    outer.body[0].body = [statement]  # type: ignore[attr-defined]
    try:
        for name in sorted(_imported_names(code)):
            outer.body.insert(0, ast.Import([ast.alias(name)]))
        flags = code.co_flags & _FUTURES
        module = compile(ast.fix_missing_locations(outer), "<kcoord>", "exec", flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return
    yield from (c for c in _all_code(module) if c.co_name == code.co_name)


def _imported_names(code: types.CodeType) -> set[str]:
    """Globals on which no method is called. Since 3.11 ``module.function()`` and ``object.method()`` are compiled differently."""
    loaded, methods, last = set(), set(), ""
    for inner in _all_code(code):
        for op, arg in instructions(inner):
            if last and is_method_load(op, arg):
                methods.add(last)
            last = global_name(inner, op, arg)
            loaded.add(last)
    return {name for name in loaded - methods if name and not hasattr(builtins, name)}


def _all_code(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _all_code(constant)


@functools.lru_cache(maxsize=1024)
def _plain(code: types.CodeType) -> tuple[Any, ...]:
    """The parts of `code` that affect its behaviour: no file name, no line numbers."""
    return (
        code.co_code,
        getattr(code, "co_exceptiontable", b""),
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~_NESTED),
        tuple(_constant(c) for c in code.co_consts),
    )


def _constant(constant: Any) -> Any:
    """A constant with its type, because ``1 == 1.0 == True``."""
    if isinstance(constant, types.CodeType):
        return ("code", constant.co_name, _plain(constant))
    if isinstance(constant, str) and _QUALNAMES_ARE_CONSTANTS:
        return ("str", constant.rpartition("<locals>.")[2])
    if isinstance(constant, tuple):
        return ("tuple", tuple(_constant(c) for c in constant))
    if constant is ...:
        return ("...",)
    if isinstance(constant, frozenset):
        return ("frozenset", frozenset(_constant(c) for c in constant))
    if isinstance(constant, (float, complex)):
        return (type(constant).__name__, repr(constant))  # -0.0 and 0.0 are equal, and nan is not
    return (type(constant).__name__, constant)
