"""Kinds of things that run code: methods, decorators' objects, Triton's functions."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from kcoord.keys.packages import Owner, module_of, owner_of

NO_CODE = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType)
HOLDERS: dict[type, tuple[str, ...]] = {
    staticmethod: ("__func__",), classmethod: ("__func__",), property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",), functools.singledispatchmethod: ("dispatcher",),
}  # fmt: skip
"""Kinds of attributes that hold functions, and the names of these."""
_METHODS = (types.FunctionType, functools.partialmethod, *HOLDERS)
_CALLED = (types.MethodType, functools.partial, type, *NO_CODE)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def is_code(value: Any) -> bool:
    """True if a walk follows `value` as code. An object of the project that can be called is a value."""
    return isinstance(value, _CALLED) or is_method(value)


def is_method(value: Any) -> bool:
    """True if a lookup of `value` on an object runs or binds code, which counts in its place."""
    return isinstance(value, _METHODS) or wrapped_by(value) is not None or jit_function(value) is not None


def wrapped_by(value: Any) -> Any:
    """The function that an installed decorator's object wraps (`functools.lru_cache`), or None.

    ``__getattr__`` is not asked: it may answer anything.
    """
    if isinstance(value, (type, types.ModuleType)) or owner_of(type(value)) is Owner.PROJECT:
        return None
    found = inspect.getattr_static(value, "__wrapped__", None)
    return getattr(value, "__wrapped__", None) if isinstance(found, _SLOTS) else found


def jit_function(value: Any) -> Any:
    """The Triton function (with `fn`, the Python function, and `src`, its text) that `value` is or wraps, or None."""
    while module_of(type(value)).partition(".")[0] == "triton" and hasattr(value, "fn"):
        if isinstance(value.fn, types.FunctionType) and hasattr(value, "src"):
            return value
        value = value.fn  # an autotuner, or heuristics
    return None
