"""The agent's part of each profile that its ranks record: merged in memory, and written while recipes arrive."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.agent.chores.chore import REST, Chore, DiskThread
from kcoord.agent.connections import Connection
from kcoord.artifacts.signing import OFF, Trust
from kcoord.artifacts.store_root import StoreRoot
from kcoord.errors import ProtocolError, StoreError
from kcoord.files.faults import fault_of
from kcoord.latest import Latest
from kcoord.packs.automatic import is_automatic
from kcoord.packs.recipe import MOST_AT_ONCE, Recipe, add, merge, today
from kcoord.packs.recipe_files import forget_superfluous, nearest_of, parts, roots, save_part, times_of_profiles
from kcoord.protocol import messages
from kcoord.settings import profile_name
from kcoord.telemetry.events import Notices

_MOST_PROFILES = 64
_MOST_BYTES = 64 << 20  # of a profile's recipes, in memory
_EVERY = 1.0  # seconds between two parts
_USED_WITHIN = 10  # days; a job may run once a week
_SERVES = 10.0  # seconds for which a profile is not read again: an agent and its node's pool ask at a job's start
_MOST_LATEST, _MOST_RECIPES_OF_LATEST = 20, 10_000


@dataclass
class _Profile:
    recipes: dict[str, Recipe] = field(default_factory=dict)
    size: int = 0  # bytes
    part: Path | None = None  # the file with the latest of them
    unsaved: bool = False


class Profiles:
    """The profiles that this agent's ranks record. A loss harms no job: no method raises for a disk's sake."""

    def __init__(
        self,
        store: Path | None,
        local_dir: Path,
        notices: Notices,
        trust: Trust = OFF,
        *,
        patience: float = 10.0,
        serves: float = _SERVES,
    ) -> None:
        self._store, self._local_dir, self._roots = store, local_dir, roots(store, local_dir)
        self._notices, self._trust, self._patience, self._serves = notices, trust, patience, serves
        self._profiles: dict[str, _Profile] = {}
        self._begun: Latest[str, Collection[Recipe]] = Latest(_MOST_PROFILES)  # of each profile, as it was read first
        self._thread = DiskThread("profiles")
        self._readings: dict[str, asyncio.Future[list[Recipe]]] = {}  # of `recorded`, under way or of the last seconds
        self._copies: dict[str, asyncio.Future[None]] = {}  # to this node, under way: the ranks of a job ask at once
        self.chores = [
            Chore("profiles", self._thread, self._save, notices, every=_EVERY, rest=REST, wanted=self._has_changes,
                  last=self._save),
        ]  # fmt: skip

    def record(self, _: Connection, __: int, message: messages.Record) -> messages.Answer:
        self.add(message.profile, message.recipes)
        return messages.Done()

    def add(self, name: str, recipes: list[Any]) -> None:
        """Merge a client's recipes. Raises `ProtocolError`, and then nothing is merged."""
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

    async def recorded(self, name: str) -> list[Recipe]:
        """The recipes that earlier jobs recorded under `name`, as read now or seconds ago; those that cannot be read are missing.

        Takes as long as the store does.
        """
        reading = self._readings.get(name)
        if reading is None:
            reading = self._readings[name] = asyncio.ensure_future(
                self._thread.run(functools.partial(self._read, name))
            )
            asyncio.get_running_loop().call_later(self._serves, self._readings.pop, name, None)
        await asyncio.wait({reading})
        if reading.cancelled() or reading.exception() is not None:
            self._readings.pop(name, None)
        return list(reading.result())

    async def latest(self) -> list[list[Recipe]]:
        """The recipes of the profiles that were written last, the latest first; a bounded number."""
        return await self._thread.run(self._latest)

    async def bring(self, _: Connection, __: int, message: messages.Profile) -> messages.ProfileState:
        """The state of a profile on this node. For a process that sees no store it is copied here. Where signatures are required,
        the part that verifies is: `checked` says that ranks are to read it here, and not in the store. `late`: not within
        `patience` seconds, ask again.

        Raises `ProtocolError` if no profile can have that name.
        """
        name = message.profile
        try:
            profile_name(name)
        except ValueError as error:
            raise ProtocolError(f"no profile can be called {name[:80]!r}: {error}") from error
        late = False
        if len(self._roots) > 1 and (self._trust.required or not message.sees_store):
            copy = self._copies.get(name)
            if copy is None:
                copy = self._copies[name] = asyncio.ensure_future(self._thread.run(functools.partial(self._copy, name)))
                copy.add_done_callback(lambda _: self._copies.pop(name, None))
            late = not (await asyncio.wait({copy}, timeout=self._patience))[0]
        return messages.ProfileState(checked=self._trust.required, late=late)

    def _copy(self, name: str) -> None:
        recipes = self._read(name)
        if recipes:
            try:
                save_part(self._roots[-1] / name, recipes, local_dir=self._local_dir)
            except StoreError as error:
                self._notices.tell(f"a profile is not saved: {error}", about=f"profiles in {self._roots[-1]}")

    def _checked_by(self, root: Path) -> Trust:
        """The trust that applies to files below `root`: this node's own need no signature."""
        return self._trust if root != self._roots[-1] else OFF

    def _own(self, root: Path) -> Path | None:
        return self._local_dir if root == self._roots[-1] else None

    def _has_changes(self) -> bool:
        return any(profile.unsaved for profile in self._profiles.values())

    async def _save(self) -> None:
        for name, profile in list(self._profiles.items()):
            if profile.unsaved:
                profile.unsaved = False  # recipes that arrive meanwhile are for the next part
                recipes = list(profile.recipes.values())
                part = await self._thread.run(functools.partial(self._write, name, recipes, profile.part))
                profile.part, profile.unsaved = part or profile.part, profile.unsaved or part is None
                self._readings.clear()  # the next job has what this one recorded

    def _read(self, name: str) -> list[Recipe]:
        name = nearest_of(self._roots, name)
        shared = self._parts(self._roots[0], name)
        if name not in self._begun and self._trust.required == bool(self._trust.keys):
            self._begun[name] = shared
        return self._merged([shared, *(self._parts(root, name) for root in self._roots[1:])])

    def _merged(self, found: Iterable[Collection[Recipe]]) -> list[Recipe]:
        return list(merge(recipe for recipes in found for recipe in recipes).values())

    def _parts(self, root: Path, name: str) -> Collection[Recipe]:
        return parts(root / name, self._notices, self._checked_by(root), self._own(root))

    def _inherited(self, name: str) -> Iterator[Recipe]:
        """Recipes of other agents that this agent's part repeats: read as its job began, and used in the last days.

        With keys, these alone that known keys have signed. Our key signs them anew, since a part is signed as a whole: a recipe
        outlives the key that signed it first. Who retires a stolen key removes the store's profiles.
        """
        if name not in self._begun:
            root = self._roots[0]
            strict = Trust("require", self._trust.keys) if self._trust.keys else OFF
            self._begun[name] = parts(
                root / name, Notices(), strict if self._own(root) is None else OFF, self._own(root)
            )
        size, oldest = 0, today() - _USED_WITHIN
        for recipe in self._begun[name]:
            size += recipe.size
            if recipe.day >= oldest and size <= _MOST_BYTES:
                yield recipe

    def _latest(self) -> list[list[Recipe]]:
        times: dict[str, float] = {}
        for root in self._roots:
            try:
                times |= times_of_profiles(root)
            except StoreError as error:
                self._notices.tell(f"profiles are not read: {error}", about=f"profiles in {root}")
        found: list[list[Recipe]] = []
        for name in sorted(times, key=lambda name: (-times[name], name))[:_MOST_LATEST]:
            if sum(map(len, found)) < _MOST_RECIPES_OF_LATEST:
                found.append(self._merged(self._parts(root, name) for root in self._roots))
        return found

    def _write(self, name: str, recipes: list[Recipe], earlier: Path | None) -> Path | None:
        """Write a part to the store, else to this node, from where a later part brings it to the store. None: both failed."""
        *_, here = self._roots
        for root in self._roots:
            try:
                if root != here and self._store is not None:
                    StoreRoot(self._store).find()
                kept = parts(here / name, self._notices, OFF, self._local_dir) if root != here else ()
                whole = merge([*recipes, *kept, *self._inherited(name)]).values()
                written = save_part(root / name, whole, earlier, self._checked_by(root), self._own(root))
                if earlier is None and is_automatic(name):
                    self._forget(root)
                return written
            except StoreError as error:
                about = fault_of(root.parent.parent, error) if root != here else f"profiles in {root}"
                self._notices.tell(f"a profile is not saved: {error}", about=about)
        return None

    def _forget(self, root: Path) -> None:
        try:
            forget_superfluous(root)
        except (OSError, StoreError) as error:
            self._notices.tell(f"old profiles are not removed: {error}", about=f"profiles in {root}")
