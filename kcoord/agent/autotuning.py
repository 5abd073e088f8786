"""Autotuning that ranks share: choices, and the measurements on which they rest. Nobody waits for another rank.

*Choices* are looked up and offered, never leased: the first writer wins. A choice that a profile recorded is offered when
somebody asks for its key. With a store, the store's rename decides, and *then* the winner is copied into the local tier: the
store's choice that lies there is never a loser's. Not guaranteed: that two nodes agree while they have no store in common, or it
does not answer. Then each node decides for itself, and asks the store again at the next look-up.

*Measurements* are shared out among the ranks that tune one key at once. A rank gets a configuration that no other measures, as
long as there is one; then one that others are slow to measure. Once all are measured, by whomever, each rank gets them all, and
they are forgotten: what lasts is the choice.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kcoord.agent.connections import Connection
from kcoord.agent.tiers import Tiers
from kcoord.artifacts import choices, local
from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, ProtocolError, StoreError
from kcoord.latest import Latest
from kcoord.packs.recipe import CHOICE, Recipe, choice_in
from kcoord.protocol import messages
from kcoord.telemetry.events import Notices

Found = tuple[Manifest, dict[str, bytes]]
_MOST_RECORDED = 10_000  # choices of profiles, some kilobytes each
_MOST_CONFIGURATIONS = 1000
_LARGEST_TIMING = 1000  # bytes
_MOST_TUNINGS = 100


class Choices:
    """Answers `Lookup` and `Offer`. Waits for the store for about `patience` seconds at most."""

    def __init__(self, tiers: Tiers, local_dir: Path, patience: float, notices: Notices) -> None:
        self._tiers, self._local_dir, self._patience, self._notices = tiers, local_dir, patience, notices
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._recorded: dict[str, Recipe] = {}  # by the digest of the choice's key

    def learn(self, recipes: Iterable[Recipe]) -> None:
        """Take the choices of a profile."""
        for recipe in recipes:
            if recipe.backend == CHOICE:
                try:
                    self._recorded[choice_in(recipe)[0].digest] = recipe
                except ValueError as error:
                    self._notices.tell(f"a profile holds what is no choice: {error}")
        for digest in list(self._recorded)[:-_MOST_RECORDED]:
            del self._recorded[digest]

    def lookup(self, _: Connection, __: int, message: messages.Lookup) -> Awaitable[messages.Choice]:
        """The choice of the key with this digest, if there is one."""
        recipe = self._recorded.get(message.digest)
        if recipe is None:
            return self._answer(message.digest, None)
        key, content = choice_in(recipe)
        manifest = choices.manifest_of(key, content, recipe.seconds, Origin.here(os.getpid(), None, ""))
        return self._answer(message.digest, (manifest, choices.contents_of(content)))

    def offer(self, connection: Connection, _: int, message: messages.Offer) -> Awaitable[messages.Choice]:
        """The choice that holds from now on: this one, or an earlier one. Raises `ProtocolError`, at once, if it is too large."""
        if len(message.content) > choices.LARGEST_CHOICE:
            raise ProtocolError(f"a choice of {len(message.content)} bytes is too large")
        origin = Origin.here(connection.who.pid, connection.who.rank, message.device)
        manifest = choices.manifest_of(message.key, message.content, message.seconds, origin)
        return self._answer(message.key.digest, (manifest, choices.contents_of(message.content)))

    async def _answer(self, digest: str, offered: Found | None) -> messages.Choice:
        """Answer ranks in turn for each key: the first one asks the store, the others find the answer on this node."""
        turn = self._turns.setdefault(digest, asyncio.Lock())
        async with turn:
            try:
                if offered is not None:
                    offered[0].encode()  # raises for a key that a manifest cannot hold
                found = await self._decided(digest, offered)
                if found is None:
                    return messages.Choice()
                manifest, contents = found
                return messages.Choice(choices.content_of(manifest.key.name, contents))
            except (StoreError, ArtifactInvalid) as error:
                self._notices.tell(f"{error}; a choice stays with the rank that made it")
                return messages.Choice()

    async def _decided(self, digest: str, offered: Found | None) -> Found | None:
        here = choices.store_decided(self._local_dir, digest)
        found = await self._read(here, digest)
        if found is not None:
            return found
        alone = choices.node_decided(self._local_dir, digest)
        offered = await self._read(alone, digest) or offered
        found = await self._in_store(digest, offered)
        if found is not None:
            await self._keep(found, here)
            return found
        if offered is not None:
            return await self._keep(offered, alone)
        return None

    async def _in_store(self, digest: str, offered: Found | None) -> Found | None:
        """The store's choice, which is `offered` if it held none; None if the store cannot be asked."""
        try:
            return await self._tiers.store.use_within(lambda store: _settle(store, digest, offered), self._patience)
        except (StoreError, ArtifactInvalid) as error:
            self._notices.tell(f"{error}; choices of autotuning stay on this node", about="choices that stay")
            return None

    async def _read(self, home: Path, digest: str) -> Found | None:
        def read() -> Found | None:
            try:
                local.check_owner(home)
                artifact = local.open_artifact(home, digest)
                return None if artifact is None else (artifact.manifest, local.read_contents(artifact))
            except ArtifactInvalid as error:
                self._notices.tell(f"{error}; it is chosen again")
                local.quarantine(home)
                return None

        return await self._tiers.locally(read)

    async def _keep(self, found: Found, home: Path) -> Found:
        """Install the choice at `home`, and return the one that is there then; `found` if the disk refuses it."""

        def keep() -> Found:
            try:
                artifact = local.install(*found, home, self._local_dir)
                return artifact.manifest, local.read_contents(artifact)
            except (StoreError, ArtifactInvalid) as error:
                self._notices.tell(f"{error}; a choice is not kept on this node")
                return found

        return await self._tiers.locally(keep)


def _settle(store: Store, digest: str, offered: Found | None) -> Found | None:
    """Raises `StoreError` and `ArtifactInvalid`. Blocks for as long as the file system does."""
    found = _fetched(store, digest)
    if found is not None or offered is None:
        return found
    try:
        store.publish(*offered)
    except StoreError:
        # somebody may have been first, and an NFS client that remembers the missing name cannot tell; `fetch` looks afresh
        found = _fetched(store, digest)
        if found is None:
            raise
        return found
    found = _fetched(store, digest)
    if found is None:
        raise StoreError(
            f"{store.home(digest)}: it vanished right after it was published: does something clean the store?"
        )
    return found


def _fetched(store: Store, digest: str) -> Found | None:
    """The choice in the store; None if there is none, or it does not verify and is set aside."""
    try:
        found = store.fetch(digest)
    except ArtifactInvalid:
        return None
    return None if found is None else found[:2]


@dataclass
class _Tuning:
    """By the configuration's number: how often it was `given` out, and its `timings`. `processes` wait for all timings.

    A process is known by two ids: the peer's as the agent sees it, which is 0 in another container, and its own.
    """

    given: list[int]
    timings: list[bytes | None]
    processes: set[tuple[int, int]] = field(default_factory=set)


class SharedMeasurements:
    """Answers `Measure`. It remembers the latest tunings; ranks of an older one measure for themselves."""

    def __init__(self, most: int = _MOST_TUNINGS) -> None:
        self._tunings: Latest[str, _Tuning] = Latest(most)  # by `Measure.digest`

    def measure(self, connection: Connection, _: int, message: messages.Measure) -> messages.Measurements:
        """The next configuration to measure; nothing if there are too many. Raises `ProtocolError` for numbers out of range."""
        process = connection.pid, connection.who.pid
        count, index, timing = message.count, message.index, message.timing
        if count > _MOST_CONFIGURATIONS:
            return messages.Measurements()
        if count < 1 or not 0 <= (index or 0) < count or len(timing or b"") > _LARGEST_TIMING:
            raise ProtocolError(f"there is no configuration {index} of {count}, or its measurement is too large")
        tuning = self._tunings.get(message.digest)
        if tuning is None or len(tuning.given) != count:
            tuning = _Tuning([0] * count, [None] * count)
        self._tunings[message.digest] = tuning
        if index is not None and timing is not None:
            tuning.timings[index] = timing
        missing = [number for number, known in enumerate(tuning.timings) if known is None]
        tuning.processes.add(process)
        if not missing:
            tuning.processes.remove(process)
            if not tuning.processes:
                del self._tunings[message.digest]
            return messages.Measurements(timings=tuning.timings)
        chosen = min(missing, key=lambda number: tuning.given[number])
        tuning.given[chosen] += 1
        return messages.Measurements(chosen)
