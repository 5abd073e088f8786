"""A compile function, by content: what its source, defaults, closure and globals say, never its `id`.

What is followed: the function's own source and bytecode, nested functions, and every global it names: plain values by
value, functions of any module (with their decorators' wrappers) by *their* content. A class and a module are
followed by name (and version) only, so a constant that is read as ``module.CONST`` is not part of the key.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.keys.cache_key import encode


def function_factors(function: Callable[..., Any], ignore: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The factors of `function`. `ignore` names globals that do not change what it compiles (a logger, say).

    Raises `KeyFactorError` for a global or closure value that has no stable identity.
    """
    seen: dict[str, str] = {}
    _visit(function, ignore, seen, {})
    return {"function": f"{function.__module__}.{function.__qualname__}", "code": seen}


def _visit(
    function: Callable[..., Any],
    ignore: frozenset[str],
    seen: dict[str, str],
    labels: dict[int, str],
    lenient: bool = False,
) -> str:
    """The label under which `seen` holds what `function` says.

    Functions of one name (closures of one factory, a function and its wrapper) are numbered in the order in which they are
    met, which is the same in every process. A decorator's wrapper is judged leniently: what it holds and cannot be keyed
    counts by its type, and functions among its globals by name; what it wraps is judged strictly again.
    """
    function = _undecorated(function)
    if id(function) in labels:
        return labels[id(function)]  # a recursive function meets itself
    name = f"{function.__module__}.{function.__qualname__}"
    label = name if name not in seen else f"{name}#{sum(n.partition('#')[0] == name for n in seen) + 1}"
    code = getattr(function, "__code__", None)
    if code is None:
        raise KeyFactorError(f"{name} has no Python code to key: wrap it in a function of yours")
    labels[id(function)], seen[label] = label, ""
    wrapped = getattr(function, "__wrapped__", None)
    lenient = lenient or wrapped is not None
    said: list[Any] = [_source(function), _bytecode(code)]
    reads = [
        ("defaults", function.__defaults__),
        ("keyword defaults", function.__kwdefaults__),
        *_closure(function),
        *_globals(function, code, ignore),
    ]
    for what, value in reads:
        if isinstance(value, types.FunctionType) and not (lenient and what.startswith("global")):
            inner = _visit(value, ignore, seen, labels, lenient and value is not wrapped)
            said.append((what, "function", inner))
        elif isinstance(value, types.ModuleType):
            said.append((what, "module", value.__name__, str(getattr(value, "__version__", ""))))
        elif isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            said.append((what, "name", f"{value.__module__}.{value.__qualname__}"))
        else:
            try:
                said.append((what, "value", encode(value)))
            except KeyFactorError as error:
                if not lenient:
                    raise KeyFactorError(
                        f"{name} reads {what}: {error}; or name it in compile_once(ignore=…) if it changes nothing"
                    ) from None
                said.append((what, "type", f"{type(value).__module__}.{type(value).__qualname__}"))
    seen[label] = hashlib.sha256(encode(said)).hexdigest()
    return label


def _undecorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Without `compile_once`, which changes nothing of what its function compiles."""
    while getattr(function, "__globals__", {}).get("__name__", "").startswith("kcoord."):
        inner = getattr(function, "__wrapped__", None)
        if inner is None:
            break
        function = inner
    return function


@functools.lru_cache(maxsize=1024)
def _source_of(code: types.CodeType) -> str:
    return inspect.getsource(code)


def _source(function: Callable[..., Any]) -> str:
    try:
        return _source_of(function.__code__)
    except (OSError, TypeError):
        return ""


@functools.lru_cache(maxsize=1024)
def _bytecode(code: types.CodeType) -> bytes:
    """What really runs: a file may have been edited after it was imported, and two lambdas may share a line."""
    handlers = getattr(code, "co_exceptiontable", b"")
    constants = [_constant(c) for c in code.co_consts]
    return encode([code.co_code, handlers, code.co_names, code.co_varnames, code.co_flags, constants])


def _constant(constant: Any) -> Any:
    if isinstance(constant, types.CodeType):
        return ("code", _bytecode(constant))
    if isinstance(constant, tuple):
        return tuple(_constant(c) for c in constant)
    return "…" if constant is ... else constant


def _closure(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"closure {name}", cell.cell_contents
        except ValueError:
            continue  # not bound yet: it cannot have been read


def _globals(function: Callable[..., Any], code: types.CodeType, ignore: frozenset[str]) -> Iterator[tuple[str, Any]]:
    for name in sorted(set(_names(code))):
        if name in function.__globals__ and name not in ignore:
            yield f"global {name}", function.__globals__[name]


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
