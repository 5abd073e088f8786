"""Attributes that the project has put into modules of Triton: ``tl.my_helper``.

Triton's own code is in its key, so the walk of a kernel's content passes over reads through Triton's modules, but for these.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Container
from typing import Any

from kcoord.keys.function.callables import jit_function
from kcoord.keys.function.reads import stores_of
from kcoord.keys.packages import Owner, owner_of


def is_triton(module: str) -> bool:
    """Triton's own code is in its key."""
    return module.partition(".")[0] in ("triton", "builtins", "math")


def is_addition(module: types.ModuleType, attribute: str, value: Any) -> bool:
    """True if the code of a module of Triton does not bind the name, or if `value` is a function or a class of the project."""
    bound = _bound_by(module)
    is_new = bound is not None and attribute not in bound
    if isinstance(value, types.ModuleType):
        return is_new and not (is_triton(value.__name__) and owner_of(value) is not Owner.PROJECT)
    found = jit_function(value)
    value = value if found is None else found.fn
    return is_new or (isinstance(value, (types.FunctionType, type)) and owner_of(value) is Owner.PROJECT)


@functools.lru_cache(maxsize=256)
def _bound_by(module: types.ModuleType) -> Container[str] | None:
    """The names that the code of `module` binds; None if it is written in C."""
    get_code = getattr(module.__spec__ and module.__spec__.loader, "get_code", None)
    code = get_code(module.__name__) if get_code is not None else None
    return None if code is None else stores_of(code)
