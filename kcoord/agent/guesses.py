"""Recipes for a job of which nothing is known but the modules that it has imported: what other jobs compiled of these."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

from kcoord.packs.recipe import Recipe

_OF_EACH = 8  # specializations of a kernel
_MOST = 256
_WITHIN = 5.0  # seconds that the profiles of other jobs may take to be read


class Guesses:
    """The guesses for one job, made once for its launcher and once for its ranks.

    ``latest()`` returns the recipes of other jobs' profiles, the latest first.
    """

    def __init__(self, latest: Callable[[], Awaitable[list[list[Recipe]]]]) -> None:
        self._latest = latest
        self._reading: asyncio.Future[list[list[Recipe]]] | None = None
        self._made = False

    async def modules(self) -> list[str]:
        """The modules of which something is known, for a rank to say which it has imported."""
        return modules_of(await self._profiles())

    async def of(self, modules: Collection[str], target: str) -> list[Recipe]:
        """The guesses for `target` or, if that is not known, for the GPU of the latest profile.

        Empty once they were made for a target that is known.
        """
        profiles = await self._profiles()
        if target:
            self._made, self._reading = True, None  # the profiles may be large
        known = next((recipe.target for recipes in profiles for recipe in recipes if recipe.target), "")
        return guessed(profiles, modules, target or known)

    async def _profiles(self) -> list[list[Recipe]]:
        """Read them once for all ranks that ask, as soon as they are there; empty if they take long, or cannot be read."""
        if self._made:
            return []
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._latest())
        done, _ = await asyncio.wait({self._reading}, timeout=_WITHIN)
        return next((task.result() for task in done if task.exception() is None), [])


def modules_of(profiles: Iterable[Collection[Recipe]]) -> list[str]:
    """The modules of the recipes, each once."""
    found = dict.fromkeys(recipe.module for recipes in profiles for recipe in recipes)
    found.pop("__main__", None)  # another script's
    return list(found)


def guessed(profiles: Sequence[Collection[Recipe]], modules: Collection[str], target: str) -> list[Recipe]:
    """The recipes for `target` of `modules` that most of the `profiles` have, which come latest first; of each kernel a few."""
    seen: Counter[str] = Counter()
    latest: dict[str, Recipe] = {}
    for recipes in profiles:
        for recipe in recipes:
            if recipe.module in modules and recipe.target == target:
                seen[recipe.digest] += 1
                latest.setdefault(recipe.digest, recipe)
    of_kernel: Counter[tuple[str, str]] = Counter()
    found = []
    for digest in sorted(latest, key=lambda digest: -seen[digest]):  # stable: the latest first
        recipe = latest[digest]
        kernel = recipe.module, recipe.qualname
        of_kernel[kernel] += 1
        if of_kernel[kernel] <= _OF_EACH:
            found.append(recipe)
    return found[:_MOST]
