"""The agent's part of each profile that its ranks record: merged in memory, and written while recipes arrive.

The disk work has a thread of its own, which a store that hangs holds for ever: nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.errors import ProtocolError, StoreError
from kcoord.profiles.parts import parts, roots, save_part
from kcoord.profiles.recipe import MOST_AT_ONCE, Recipe, add, merge
from kcoord.settings import profile_name
from kcoord.telemetry.events import Notices, log

_MOST_PROFILES = 64
_MOST_BYTES = 64 << 20  # of a profile's recipes, in memory
_EVERY = 1.0  # seconds between two parts
_SHARE = 20  # a part that took long to write is not written again for so many times as long


@dataclass
class _Profile:
    recipes: dict[str, Recipe] = field(default_factory=dict)
    size: int = 0  # bytes
    part: Path | None = None  # where they were written last
    unsaved: bool = False


class Profiles:
    """What this agent's ranks record. Losing any of it harms no job: no method raises for a disk's sake."""

    def __init__(self, store: Path | None, local_dir: Path, notices: Notices) -> None:
        self._roots, self._notices = roots(store, local_dir), notices
        self._profiles: dict[str, _Profile] = {}
        self._io = ThreadPoolExecutor(1, "profiles")
        self._saving: asyncio.Task[None] | None = None
        self._rest_until = 0.0

    def add(self, name: str, recipes: list[Any]) -> None:
        """Merge what a client sent. Raises `ProtocolError`, and then nothing is merged."""
        try:
            profile_name(name)
            if len(recipes) > MOST_AT_ONCE:
                raise ValueError(f"{len(recipes)} recipes are too many for a frame")
            checked = [Recipe.from_wire(recipe) for recipe in recipes]
        except ValueError as error:
            raise ProtocolError(f"this cannot be recorded: {error}") from error
        if name not in self._profiles and len(self._profiles) >= _MOST_PROFILES:
            self._notices.tell(f"the profile {name} is not recorded: this agent records {_MOST_PROFILES} others")
            return
        profile = self._profiles.setdefault(name, _Profile())
        for recipe in checked:
            fresh = recipe.digest not in profile.recipes
            if fresh and profile.size + recipe.size > _MOST_BYTES:
                self._notices.tell(f"the profile {name} is full", about=f"full {name}")
            elif add(profile.recipes, recipe):
                profile.size += recipe.size if fresh else 0
                profile.unsaved = True

    def pulse(self) -> None:
        """Begin to write what is unsaved, unless that is under way or was done a moment ago."""
        idle = self._saving is None or self._saving.done()
        if idle and time.monotonic() >= self._rest_until and any(p.unsaved for p in self._profiles.values()):
            self._saving = asyncio.create_task(self._save())
            self._saving.add_done_callback(self._done)

    async def drain(self, timeout: float) -> None:
        """Write what is left, within `timeout` seconds; then no more is written."""
        rest = asyncio.create_task(self._finish())
        rest.add_done_callback(self._done)
        _, late = await asyncio.wait({rest}, timeout=timeout)
        if late:
            rest.cancel()
            self._notices.tell(
                f"{self._roots[0]}: it has not answered for {timeout:g} s; what was recorded last is lost"
            )
        self._io.shutdown(wait=False, cancel_futures=True)

    async def _finish(self) -> None:
        if self._saving is not None:
            await asyncio.wait({self._saving})
        await self._save()

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._notices.tell(f"an error in the agent, please report it: {type(error).__name__}: {error}")
            log.error("a profile was not saved", exc_info=error)

    async def _save(self) -> None:
        begun = time.monotonic()
        for name, profile in list(self._profiles.items()):
            if profile.unsaved:
                profile.unsaved = False  # what arrives meanwhile is for the next part
                recipes = list(profile.recipes.values())
                work = asyncio.get_running_loop().run_in_executor(self._io, self._write, name, recipes, profile.part)
                part = await work
                profile.part, profile.unsaved = part or profile.part, profile.unsaved or part is None
        now = time.monotonic()
        self._rest_until = now + max(_EVERY, _SHARE * (now - begun))

    def _write(self, name: str, recipes: list[Recipe], earlier: Path | None) -> Path | None:
        """Where they can be written: what the store refuses stays on this node, and goes there with a later part."""
        *_, here = self._roots
        for root in self._roots:
            try:
                whole = merge([*recipes, *parts(here / name, self._notices)]) if root != here else merge(recipes)
                return save_part(root / name, whole.values(), earlier)
            except StoreError as error:
                self._notices.tell(f"a profile is not kept there: {error}", about=f"profiles in {root}")
        return None
