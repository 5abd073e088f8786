"""Wrappers of a compiler's functions, and the check that this release has the functions that a hook expects."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def wraps(native: Callable[..., Any]) -> Callable[[F], F]:
    """As `functools.wraps`. `is_wrapped` knows the wrapper."""

    def decorate(wrapper: F) -> F:
        found = functools.wraps(native)(wrapper)
        found.__kcoord_wrapped__ = True  # type: ignore[attr-defined]
        return found  # type: ignore[return-value]

    return decorate


def is_wrapped(function: object) -> bool:
    return hasattr(function, "__kcoord_wrapped__")


def differing(package: str, needed: Mapping[str, str]) -> str:
    """The first name that this release lacks, or that takes other parameters; empty if there is none.

    Each name is ``module:attribute.attribute``, below `package` and imported; its value the parameters, in order, if any are
    to be compared. Nothing is evaluated: an attribute may be a setting that is read live.
    """
    for name, parameters in needed.items():
        module, _, path = name.partition(":")
        found: Any = sys.modules.get(f"{package}.{module}")
        for part in path.split("."):
            found = inspect.getattr_static(found, part, None)
        found = getattr(found, "__func__", found)
        if found is None or (parameters and list(inspect.signature(found).parameters) != parameters.split()):
            return name
    return ""
