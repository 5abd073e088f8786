"""Wrappers of a compiler's functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
