"""What a warm-up is to do, one task a key: recipes, for the GPUs that they are wanted for, and calls of compile functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kcoord.backends.base import notices
from kcoord.backends.python.recipes import replay_call
from kcoord.backends.registry import replayer
from kcoord.keys.device import GPUTarget
from kcoord.profiles.recipe import Recipe

T = TypeVar("T")

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A `kcoord.compile_once` function and the arguments to compile it for."""


@dataclass(frozen=True)
class Task:
    """``run(waits)`` is ``compiled``, ``loaded`` or, unless it waits, ``busy``; it raises what importing and compiling raise.

    `seconds` is what its compile took when it was recorded, 0 if that is not known.
    """

    name: str
    run: Callable[[bool], str]
    seconds: float = 0.0


def distinct(items: Sequence[T], targets: Sequence[object]) -> list[T]:
    """`items`; where `targets` take the place of what was recorded, without the recipes that differ in nothing but that."""
    found: dict[object, T] = {}
    for number, item in enumerate(items):
        same: object = number
        if targets and isinstance(item, Recipe) and _is_portable(item):
            same = replace(item, target="").digest
        found.setdefault(same, item)
    return list(found.values())


def tasks_of(item: Recipe | Call, targets: Sequence[GPUTarget] = ()) -> list[Task]:
    """The tasks of `item`, for `targets` or, if there are none, for what was recorded or for the current device."""
    replay: Callable[[GPUTarget | None, bool], str]
    if isinstance(item, Recipe):
        name, seconds, recorded, recipe = f"{item.module}.{item.qualname}", item.seconds, item.target, item
        backend = replayer(recipe.backend)
        if backend is None:
            notices.tell(f"{name}: this kcoord has no backend {recipe.backend!r}; its recipes are skipped")
            return []

        def replay(target: GPUTarget | None, waits: bool) -> str:
            return backend.replay(recipe, target, waits)
    else:
        function, arguments = item
        name, seconds, recorded = getattr(function, "__qualname__", repr(function)), 0.0, ""

        def replay(target: GPUTarget | None, waits: bool) -> str:
            return replay_call(function, tuple(arguments), {}, waits, target)

    return [_task(name, seconds, target, replay) for target in [*map(str, targets)] or [recorded]]


def _task(name: str, seconds: float, target: str, replay: Callable[[GPUTarget | None, bool], str]) -> Task:
    """A recorded target is text, and as little trusted as the rest of its recipe; none: the current device."""

    def run(waits: bool) -> str:
        return replay(GPUTarget.parse(target) if target else None, waits)

    return Task(f"{name} for {target}" if target else name, run, seconds)


def _is_portable(recipe: Recipe) -> bool:
    backend = replayer(recipe.backend)
    return backend is None or backend.is_portable(recipe)
