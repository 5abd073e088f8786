"""Recipes of one process that wait for their delivery to the agent."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

from kcoord.errors import StoreError
from kcoord.packs.recipe import MOST_AT_ONCE, MOST_RECIPES, Recipe, add
from kcoord.packs.recipe_files import roots, save_part
from kcoord.protocol.messages import Done, Record
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

_FRAME_BYTES = 1 << 20  # a quarter of the largest frame; a recipe's own bound is far below


class RecipeQueue:
    """Recipes for the profile `recorded_as`. Thread-safe. Not guaranteed: that the last ones of a killed process arrive."""

    def __init__(self, settings: Settings, client: AgentClient, notices: Notices) -> None:
        self._settings, self._client, self._notices = settings, client, notices
        # protects the two below; reentrant, since a signal's handler may come while its thread is in here
        self._lock = threading.RLock()
        self._seen: dict[str, int] = {}  # digest → order
        self._waiting: dict[str, Recipe] = {}
        self._delivering = threading.Lock()

    def put(self, recipe: Recipe) -> None:
        """Keep `recipe` for the next delivery, unless it was put before, with an earlier order. Costs microseconds."""
        digest = recipe.digest
        with self._lock:
            if recipe.order < self._seen.get(digest, math.inf) and len(self._seen) < MOST_RECIPES:
                self._seen[digest] = recipe.order
                add(self._waiting, recipe)

    def deliver(self) -> bool:
        """Deliver all recipes. False if no agent took them; none is started."""
        name = self._settings.recorded_as
        if name is None or not self._waiting or not self._delivering.acquire(blocking=False):
            return True  # another thread delivers; the next delivery has the rest
        try:
            for batch in _batches(self._snapshot()):
                request = Record(name, [recipe.to_wire() for recipe in batch])
                if self._client.ask(request, Done, quietly=True, start=False) is None:
                    return False
                self._delivered(batch)
        finally:
            self._delivering.release()
        return True

    def keep(self) -> None:
        """Write the recipes as a part on this node, without an agent. Only agents write to the store, which may hang."""
        name, recipes = self._settings.recorded_as, self._snapshot()
        if name is None or not recipes:
            return
        try:
            here = self._settings.local_dir
            save_part(roots(None, here)[0] / name, recipes, local_dir=here)
        except StoreError as error:
            self._notices.tell(f"the profile {name} is not kept: {error}")
        else:
            self._delivered(recipes)

    def _snapshot(self) -> list[Recipe]:
        with self._lock:
            return list(self._waiting.values())

    def _delivered(self, recipes: list[Recipe]) -> None:
        with self._lock:
            for recipe in recipes:
                if self._waiting.get(recipe.digest) is recipe:
                    del self._waiting[recipe.digest]


def _batches(recipes: list[Recipe]) -> Iterator[list[Recipe]]:
    batch: list[Recipe] = []
    size = 0
    for recipe in recipes:
        if batch and (len(batch) == MOST_AT_ONCE or size + recipe.size > _FRAME_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(recipe)
        size += recipe.size
    if batch:
        yield batch
