"""Attributes that the project has put into modules of Triton, ``tl.my_helper``, among those that a kernel reads.

Triton's own code is in its key, so the walk of a kernel's content passes over reads through Triton's modules. An attribute is
an addition if the code of its module does not bind its name, or if it is a function or a class of the project.

Not seen: an addition that only a plain Python function reads, which a function of the host calls.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Container, Iterator, Mapping
from typing import Any

from kcoord.keys.function.bodies import closure_of
from kcoord.keys.function.lookup import is_project, jit_function
from kcoord.keys.function.reads import reads_of, stores_of
from kcoord.keys.function.watch import MISSING, Watch
from kcoord.keys.packages import Owner, owner_of


def is_triton(module: str) -> bool:
    """Triton's own code is in its key."""
    return module.partition(".")[0] in ("triton", "builtins", "math")


def additions(function: types.FunctionType, watch: Watch) -> Iterator[tuple[str, Any]]:
    """The additions that `function` reads, by name. `watch` watches which values they are."""
    roots: dict[str, Mapping[str, Any]] = {
        "global": function.__globals__,
        "closure": dict(closure_of(function)),
        "imported": sys.modules,
    }
    for read in reads_of(function.__code__):
        value = roots.get(read.kind, {}).get(read.name, MISSING)
        for attribute in read.path:
            if not isinstance(value, types.ModuleType):
                break
            module, value = value, vars(value).get(attribute, MISSING)
            if _is_tritons(module) and value is not MISSING and _is_addition(module, attribute, value):
                watch.item(vars(module), attribute)
                yield f"{module.__name__}.{attribute}", value
                break


def _is_tritons(module: types.ModuleType) -> bool:
    return is_triton(module.__name__) and owner_of(module) is not Owner.PROJECT


def _is_addition(module: types.ModuleType, attribute: str, value: Any) -> bool:
    bound = _bound_by(module)
    is_new = bound is not None and attribute not in bound
    if isinstance(value, types.ModuleType):
        return is_new and not _is_tritons(value)
    found = jit_function(value)
    value = value if found is None else found.fn
    return is_new or (isinstance(value, (types.FunctionType, type)) and is_project(value))


@functools.lru_cache(maxsize=256)
def _bound_by(module: types.ModuleType) -> Container[str] | None:
    """The names that the code of `module` binds; None if it is written in C."""
    get_code = getattr(module.__spec__ and module.__spec__.loader, "get_code", None)
    code = get_code(module.__name__) if get_code is not None else None
    return None if code is None else stores_of(code)
