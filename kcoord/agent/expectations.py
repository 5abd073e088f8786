"""The time after which a compile counts as slow: a multiple of the longest earlier compile of the same kernel."""

from __future__ import annotations

import math
from collections.abc import Iterable

from kcoord.profiles.recipe import Recipe

_NAMES_REMEMBERED = 20_000


class Expectations:
    """Learns from this node's compiles, and from the job's profile.

    `factor`: a compile is slow when it takes so many times the longest known compile of its name; 0: never. `least`: seconds
    below which none is slow, for a machine may be busy. A new name is expected to take as long as the longest kernel of all. Not
    guaranteed: that a slow compile hangs. One kernel's variants may differ a hundredfold.
    """

    def __init__(self, factor: float, least: float) -> None:
        self._factor, self._least = factor, least
        self._longest: dict[str, float] = {}  # backend:name → seconds
        self._longest_of_all = 0.0

    def learn(self, name: str, seconds: float) -> None:
        """A compile of ``backend:name`` took so many seconds."""
        longest = max(seconds, self._longest.pop(name, 0.0))
        if len(self._longest) >= _NAMES_REMEMBERED:
            del self._longest[next(iter(self._longest))]
        self._longest[name] = longest
        self._longest_of_all = max(seconds, self._longest_of_all)

    def learn_all(self, recipes: Iterable[Recipe]) -> None:
        """Learn the compile times of a profile."""
        for recipe in recipes:
            self.learn(f"{recipe.backend}:{recipe.qualname.rpartition('.')[2]}", recipe.seconds)

    def slow_after(self, name: str) -> float:
        """Seconds; infinity if nothing is known."""
        if not self._factor or not self._longest_of_all:
            return math.inf
        return max(self._least, self._factor * self._longest.get(name, self._longest_of_all))
