"""Recipes of `kcoord.compile_once` functions: the function's import path and plain arguments."""

from __future__ import annotations

from typing import Any

from kcoord.errors import KcoordError
from kcoord.keys.device import GPUTarget
from kcoord.packs.recipe import Recipe


def recipe_of(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: GPUTarget | None, seconds: float
) -> Recipe | None:
    """The recipe of a call; None if the function cannot be imported, or an argument is no plain value."""
    module, qualname = function.__module__, function.__qualname__
    if module == "__main__" or "<locals>" in qualname:
        return None
    return Recipe.of("python", module, qualname, {"args": args, "kwargs": kwargs}, target, seconds)


def replay_call(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], waits: bool, target: GPUTarget | None = None
) -> str:
    """``compiled``, ``loaded`` or, without `waits`, ``busy``."""
    if not hasattr(function, "warm"):
        raise KcoordError(
            f"{getattr(function, '__qualname__', function)} is no compile function: decorate it with compile_once"
        )
    how: str = function.warm(args, kwargs, waits, target)
    return how
