"""The agent's part of choices: looked up and offered, never leased; the first writer wins, and nobody waits for another's.

With a store, the store's rename decides, and *then* the winner comes into the local tier: what lies there as the store's
choice is never a loser's. Not guaranteed: that two nodes agree while they have no store in common, or it does not answer; then
each node decides for itself, and asks the store again at the next look-up.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from kcoord.agent.lease_tasks import LeaseTasks
from kcoord.artifacts import choices, local
from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, ProtocolError, StoreError
from kcoord.protocol import fields
from kcoord.telemetry.events import Notices

Found = tuple[Manifest, dict[str, bytes]]


class Choices:
    """Answers `lookup` and `offer`. Each answer comes within about `patience` seconds of the store, however that does."""

    def __init__(self, errands: LeaseTasks, local_dir: Path, patience: float, notices: Notices) -> None:
        self._errands, self._local_dir, self._patience, self._notices = errands, local_dir, patience, notices
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def lookup(self, message: Mapping[str, Any]) -> Coroutine[Any, Any, dict[str, Any]]:
        """The answer to come: the choice under a digest, or that there is none. Raises `ProtocolError`, at once."""
        return self._answer(fields.digest(message), None)

    def offer(self, message: Mapping[str, Any], pid: int, rank: int | None) -> Coroutine[Any, Any, dict[str, Any]]:
        """The answer to come: what holds from now on, this choice or an earlier one. Raises `ProtocolError`, at once."""
        key, content = fields.key(message), fields.field(message, "content", bytes)
        if len(content) > choices.LARGEST_CHOICE:
            raise ProtocolError(f"a choice of {len(content)} bytes is too large")
        origin = Origin.here(pid, rank, fields.text(message, "device"))
        manifest = choices.manifest_of(key, content, fields.seconds(message, "seconds"), origin)
        return self._answer(key.digest, (manifest, choices.contents_of(content)))

    async def _answer(self, digest: str, offered: Found | None) -> dict[str, Any]:
        """One at a time for each key: the node asks the store once, and its other ranks find the answer here."""
        turn = self._turns.setdefault(digest, asyncio.Lock())
        async with turn:
            try:
                if offered is not None:
                    choices.check(offered[0])
                found = await self._decided(digest, offered)
                if found is None:
                    return {"op": "none"}
                manifest, contents = found
                return {"op": "choice", "content": choices.content_of(manifest.key.name, contents)}
            except (StoreError, ArtifactInvalid) as error:
                self._notices.tell(f"{error}; a choice stays with the rank that made it")
                return {"op": "none"}

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
        """What the store holds, after `offered` was put there if it held nothing; None if it cannot be asked."""
        try:
            return await self._errands.in_store(lambda store: _settle(store, digest, offered), self._patience)
        except (StoreError, ArtifactInvalid) as error:
            self._notices.tell(f"{error}; choices of autotuning stay on this node", about="choices that stay")
            return None

    async def _read(self, home: Path, digest: str) -> Found | None:
        def read() -> Found | None:
            try:
                artifact = local.open_artifact(home, digest)
                return None if artifact is None else (artifact.manifest, local.read_contents(artifact))
            except ArtifactInvalid as error:
                self._notices.tell(f"{error}; it is chosen again")
                local.quarantine(home)
                return None

        return await self._errands.locally(read)

    async def _keep(self, found: Found, home: Path) -> Found:
        """What is at `home` then. A disk that refuses takes the choice from nobody: it is answered all the same."""

        def keep() -> Found:
            try:
                artifact = local.install(*found, home)
                return artifact.manifest, local.read_contents(artifact)
            except (StoreError, ArtifactInvalid) as error:
                self._notices.tell(f"{error}; a choice is not kept on this node")
                return found

        return await self._errands.locally(keep)


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
    """What does not verify was set aside by `fetch`, and is missing."""
    try:
        found = store.fetch(digest)
    except ArtifactInvalid:
        return None
    return None if found is None else found[:2]
