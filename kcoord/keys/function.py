"""A compile function, by content: what its source, defaults, closure and globals say, never its `id`.

What is followed: the function's own code, nested functions, and every global it names: plain values by value, functions of
any module by *their* content. A module is followed by its name and version only, so a constant that is read as
``module.CONST`` is not part of the key.
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
    _visit(function, ignore, seen)
    return {"function": f"{function.__module__}.{function.__qualname__}", "code": seen}


def _visit(function: Callable[..., Any], ignore: frozenset[str], seen: dict[str, str]) -> None:
    function = inspect.unwrap(function)
    name = f"{function.__module__}.{function.__qualname__}"
    if name in seen:
        return
    code = getattr(function, "__code__", None)
    if code is None:
        raise KeyFactorError(f"{name} has no Python code to key: wrap it in a function of yours")
    seen[name] = ""  # a recursive function meets itself
    hasher = hashlib.sha256(_source(function).encode())
    reads = [
        ("defaults", function.__defaults__),
        ("keyword defaults", function.__kwdefaults__),
        *_closure(function),
        *_globals(function, code, ignore),
    ]
    for what, value in reads:
        hasher.update(what.encode())
        if isinstance(value, types.FunctionType):
            _visit(value, ignore, seen)
            hasher.update(f"{value.__module__}.{value.__qualname__}".encode())
        elif isinstance(value, types.ModuleType):
            hasher.update(f"{value.__name__} {getattr(value, '__version__', '')}".encode())
        elif isinstance(value, (type, types.BuiltinFunctionType)):
            hasher.update(f"{value.__module__}.{value.__qualname__}".encode())
        else:
            try:
                hasher.update(encode(value))
            except KeyFactorError as error:
                raise KeyFactorError(
                    f"{name} reads {what}: {error}; or name it in compile_once(ignore=…) if it changes nothing"
                ) from None
    seen[name] = hasher.hexdigest()


@functools.lru_cache(maxsize=1024)
def _source_of(code: types.CodeType) -> str:
    return inspect.getsource(code)


def _source(function: Callable[..., Any]) -> str:
    try:
        return _source_of(function.__code__)
    except (OSError, TypeError):
        return _bytecode(function.__code__)


def _bytecode(code: types.CodeType) -> str:
    constants = [_bytecode(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


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
