"""The compiles that an autotuner's measurements will begin, as recipes: announced, they are done at once by the node's pool.

Without that, ranks that tune in step compile one configuration after another. A configuration's signature and constants follow
from its launch, which Triton itself runs here up to the place where it looks into its cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from kcoord.backends.triton.recipes import recipe_of
from kcoord.interruption import let_through
from kcoord.packs.recipe import MOST_AT_ONCE, TRIED, Recipe


class _Listing(threading.local):
    """`active` while the current thread wants to know a launch's compile, and not its result."""

    active = False


listing = _Listing()


class Listed(BaseException):
    """Ends such a launch where its compile would begin. No hook's guard may catch it."""

    def __init__(self, source: Any, target: Any, options: Any) -> None:
        super().__init__("listed")
        self.source, self.target, self.options = source, target, options


def recipes_of(launches: Sequence[Callable[[], object]]) -> list[Recipe]:
    """The recipes of the compiles that ``launch()`` would begin; none for a kernel that is in memory, or cannot be imported.

    Their orders are the launches' numbers, from `TRIED` on.
    """
    found = []
    for order, launch in enumerate(launches[:MOST_AT_ONCE], TRIED):
        before, listing.active = listing.active, True
        try:
            launch()
        except Listed as listed:
            recipe = recipe_of(listed.source, listed.target, listed.options, 0.0, order)
            if recipe is None:
                return []  # nor the others
            found.append(recipe)
        except Exception as error:  # noqa: BLE001 - the tuner meets it, too, when it measures
            let_through(error)
            return found
        finally:
            listing.active = before
    return found
