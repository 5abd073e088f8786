"""Tasks of a warm-up, one for each key: a recipe and a GPU, or a call of a compile function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kcoord.backends.fail_open import coordinator_in_use, notices
from kcoord.backends.python.compile_once import replay_call
from kcoord.backends.registry import compiler_of, replayer
from kcoord.keys.device import GPUTarget
from kcoord.profiles.choices import KIND, choice_in
from kcoord.profiles.recipe import Recipe

T = TypeVar("T")

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A `kcoord.compile_once` function and the arguments to compile it for."""


@dataclass(frozen=True)
class Task:
    """``run(waits)`` returns ``compiled``, ``loaded`` or, unless it waits, ``busy``; raises what importing and compiling raise.

    `seconds` is the recorded time of its compile, 0 if unknown.
    """

    name: str
    run: Callable[[bool], str]
    seconds: float = 0.0


def distinct(items: Sequence[T], targets: Sequence[object]) -> list[T]:
    """`items`; if `targets` replace the recorded ones, without recipes that differ only in their target."""
    found: dict[object, T] = {}
    for number, item in enumerate(items):
        same: object = number
        if targets and isinstance(item, Recipe) and _is_portable(item):
            same = replace(item, target="").digest
        found.setdefault(same, item)
    return list(found.values())


def tasks_of(item: Recipe | Call, targets: Sequence[GPUTarget] = ()) -> list[Task]:
    """The tasks of `item`, for `targets` or, without any, for the recorded target or the current device."""
    replay: Callable[[GPUTarget | None, bool], str]
    if isinstance(item, Recipe) and item.backend == KIND:
        name, seconds, recorded, choice = item.qualname, item.seconds, "", item

        def replay(target: GPUTarget | None, waits: bool) -> str:
            return _offered(choice)
    elif isinstance(item, Recipe):
        name, seconds, recorded, recipe = f"{item.module}.{item.qualname}", item.seconds, item.target, item
        if compiler_of(recipe.backend) is None:
            notices.tell(f"{name}: this kcoord has no backend {recipe.backend!r}; its recipes are skipped")
            return []

        def replay(target: GPUTarget | None, waits: bool) -> str:
            return replayer(recipe.backend).replay(recipe, target, waits)
    else:
        function, arguments = item
        name, seconds, recorded = getattr(function, "__qualname__", repr(function)), 0.0, ""

        def replay(target: GPUTarget | None, waits: bool) -> str:
            return replay_call(function, tuple(arguments), {}, waits, target)

    return [_task(name, seconds, target, replay) for target in [*map(str, targets)] or [recorded]]


def _task(name: str, seconds: float, target: str, replay: Callable[[GPUTarget | None, bool], str]) -> Task:
    """A recorded target is untrusted text, like the rest of its recipe; empty: the current device."""

    def run(waits: bool) -> str:
        return replay(GPUTarget.parse(target) if target else None, waits)

    return Task(f"{name} for {target}" if target else name, run, seconds)


def _offered(recipe: Recipe) -> str:
    """Offer a recorded choice, unless there is one. Always ``loaded``: nothing is compiled. Raises ValueError for no choice."""
    coordinator, (key, content) = coordinator_in_use(), choice_in(recipe)
    if coordinator is not None and coordinator.choices.get(key) is None:
        coordinator.choices.offer(key, content, recipe.seconds)
    return "loaded"


def _is_portable(recipe: Recipe) -> bool:
    compiler = compiler_of(recipe.backend)
    return compiler is None or compiler.portable
