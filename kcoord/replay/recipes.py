"""Recipes made ready for a replay, and the replay of one: all that this room asks the compilers' backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kcoord.backends.fail_open import coordinator_in_use, notices
from kcoord.backends.registry import compiler_of, install, replayer
from kcoord.interruption import let_through
from kcoord.keys.device import GPUTarget
from kcoord.packs.recipe import CHOICE, Recipe, choice_in


def replayable(recipes: Iterable[Recipe], targets: Sequence[str] = ()) -> list[Recipe]:
    """The recipes whose compilers are here and hooked, each once. Hooks them.

    `targets` replace the recorded ones.
    """
    found: dict[str, Recipe] = {}
    hooked: list[str] | None = None
    for recipe in recipes:
        if recipe.backend == CHOICE:
            found.setdefault(recipe.digest, recipe)
            continue
        compiler = compiler_of(recipe.backend)
        if compiler is None:
            notices.tell(f"{name_of(recipe)}: this kcoord has no backend {recipe.backend!r}; its recipes are skipped")
            continue
        if compiler.modules:
            hooked = install() if hooked is None else hooked
            if compiler.name not in hooked:
                continue  # each rank would compile it for itself
        for each in [replace(recipe, target=target) for target in targets] or [recipe]:
            found.setdefault(each.digest, each)
    return list(found.values())


def replayed(recipe: Recipe, *, waits: bool = False) -> tuple[str, str]:
    """Compile `recipe`: see `settled`. An empty target is the current device."""

    def run() -> str:
        if recipe.backend == CHOICE:
            return _offered(recipe)
        return replayer(recipe.backend).replay(recipe, GPUTarget.parse(recipe.target) if recipe.target else None, waits)

    return settled(run)


def settled(run: Callable[[], str]) -> tuple[str, str]:
    """The result of `run`: ``compiled``, ``loaded``, ``busy`` (another process of the job is at it); or ``failed``, and why.

    A recipe's module may raise anything, even SystemExit, and so may its compiler: the rank that needs the key meets it too.
    """
    try:
        return run(), ""
    except (Exception, SystemExit) as error:  # noqa: BLE001 - see above
        let_through(error)
        return "failed", f"{type(error).__name__}: {error}".partition("\n")[0]


def name_of(recipe: Recipe) -> str:
    """The recipe's name for people."""
    name = recipe.qualname if recipe.backend == CHOICE else f"{recipe.module}.{recipe.qualname}"
    return f"{name} for {recipe.target}" if recipe.target else name


def _offered(recipe: Recipe) -> str:
    """Offer a recorded choice, unless there is one. Always ``loaded``: nothing is compiled. Raises ValueError for no choice."""
    coordinator, (key, content) = coordinator_in_use(), choice_in(recipe)
    if coordinator is not None and coordinator.choices.get(key) is None:
        coordinator.choices.offer(key, content, recipe.seconds)
    return "loaded"
