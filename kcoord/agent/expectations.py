"""The time after which a compile counts as slow: a multiple of the longest earlier compile of the same key or recipe."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kcoord.latest import Latest
from kcoord.packs.recipe import Recipe

_REMEMBERED = 100_000  # keys and recipes, some 150 bytes each


class Expectations:
    """Learns from this node's compiles and fetches, by key, and from the job's profile, by recipe.

    `factor`: a compile is slow when it takes so many times the longest known one; 0: never. `least`: seconds below which none is
    slow, for a machine may be busy. A compile of which nothing is known is never slow: another variant of its kernel may take a
    hundredth of its time. Not guaranteed: that a slow compile hangs.
    """

    def __init__(self, factor: float, least: float) -> None:
        self._factor, self._least = factor, least
        self._longest: Latest[str, float] = Latest(_REMEMBERED)  # digest → seconds

    def learn(self, digest: str, seconds: float) -> None:
        """A compile of the key, or the recipe, with this digest took so many seconds."""
        self._longest[digest] = max(seconds, self._longest.get(digest, 0.0))

    def learn_all(self, recipes: Iterable[Recipe]) -> None:
        """Learn the compile times of a profile."""
        for recipe in recipes:
            self.learn(recipe.digest, recipe.seconds)

    def slow_after(self, *digests: str | None) -> float:
        """Seconds, by what is known of any of `digests`; infinity if nothing is."""
        known = [self._longest[digest] for digest in digests if digest is not None and digest in self._longest]
        if not self._factor or not known:
            return math.inf
        return max(self._least, self._factor * max(known))
