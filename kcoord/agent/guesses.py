"""Recipes for a job of which nothing is known but the modules that it has imported: what other jobs compiled of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from kcoord.profiles.recipe import Recipe

_OF_EACH = 8  # specializations of a kernel
_MOST = 256


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
