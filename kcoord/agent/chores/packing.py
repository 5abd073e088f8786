"""Writes the pack of this agent's profile once its ranks have used artifacts that the newest pack lacks.

One agent at a time does, by a lease.

The next agent finds that pack, and adds the artifacts of its own ranks, if there are many: so the pack of a job whose nodes run
different stages holds the kernels of all. Artifacts that no job has used for ten days are not in the next pack, unless the
profile is pinned.

Not guaranteed: that a pack holds one job's artifacts alone. An agent of several jobs packs what all of them use. A job that is
killed before its ranks have been quiet for half a minute leaves none.
"""

from __future__ import annotations

import functools
import time

from kcoord.agent.chores.chore import REST, Chore, DiskThread
from kcoord.agent.packs import Packs, UsedArtifacts
from kcoord.artifacts.store import Store
from kcoord.errors import LeaseUnavailable, StoreError
from kcoord.files.beneath import MARKED_AFTER
from kcoord.leases.base import LeaseService, leased
from kcoord.packs.index import PackInvalid, Use
from kcoord.packs.pack import Pack
from kcoord.packs.recipe import today
from kcoord.packs.writing import USED_WITHIN, added, own_pack, write_pack
from kcoord.retention.pins import is_pinned
from kcoord.telemetry.events import Notices, log

_BUSY = 60.0  # seconds to the next attempt if another agent writes, or one failed
_ENOUGH = 0.1
"""Share of the used artifacts; a pack that lacks more is replaced. To replace one costs a write of up to 256 MiB, and a read of
it when a node starts next; what is lacking costs 3 requests for each artifact and node.
"""


class PackWriter:
    """Writes the pack of `profile`, which the agent's settings name. A loss harms no job: no method raises for a disk's sake.

    Times in seconds. `quiet`: without a new artifact, the job has what it needs. `every`: between two attempts.
    """

    def __init__(
        self, store: Store | None, profile: str | None, packs: Packs, used: UsedArtifacts, leases: LeaseService, agent: str,
        ttl: float, notices: Notices, *, quiet: float = 30.0, every: float = 5.0,
    ) -> None:  # fmt: skip
        self._packs, self._used, self._leases, self._quiet = packs, used, leases, quiet
        self._token, self._ttl = f"{agent}.pack", ttl
        self._considered = self._state(profile)  # when a pack was enough
        self._asks, self._since = 0, time.monotonic()  # `used.asks`, and when it last grew
        self._ended = False
        thread = self._thread = DiskThread("packing")
        self._chore: Chore | None = None
        self.chores: list[Chore] = []
        if store is not None:
            self.chores.append(
                Chore("uses of packs", thread, packs.touch, notices, first=MARKED_AFTER, every=MARKED_AFTER)
            )
        if store is not None and profile is not None and store.trust.publishes:
            write = functools.partial(self._write, store, profile)
            wanted = functools.partial(self._is_wanted, profile)
            self._chore = Chore(
                "the job's pack", thread, write, notices, every=every, rest=REST, wanted=wanted, last=write
            )
            self.chores.append(self._chore)

    def job_ended(self) -> None:
        """The last rank has left. Write the pack as soon as the store has all artifacts that ranks asked for."""
        self._asks, self._ended = self._used.asks, True
        if self._chore is not None:
            self._chore.run_soon()

    def _state(self, profile: str | None) -> tuple[int, int]:
        """The numbers of used artifacts and of damaged ones in the pack that serves; a pack is written when they grow."""
        serving = self._packs.get(profile) if profile is not None else None
        return self._used.count, len(serving.damaged) if serving is not None else 0

    def _is_wanted(self, profile: str) -> bool:
        asks, now = self._used.asks, time.monotonic()
        if asks != self._asks:
            self._asks, self._since, self._ended = asks, now, False
        quiet = now > self._since + self._quiet or (self._ended and self._used.count == asks)
        return quiet and self._state(profile) != self._considered

    async def _write(self, store: Store, profile: str) -> float | None:
        """One attempt. Returns the seconds to the next one if another agent writes, or a disk or a service fails."""
        state, used, loads = self._state(profile), self._used.uses(), self._used.loads
        if not used or state == self._considered or self._packs.is_unread(profile):
            return None
        try:
            if not await self._thread.run(lambda: self._has_enough(store, profile, used)):
                async with leased(self._leases, f"pack {profile}", self._token, self._ttl) as writes:
                    if not writes:
                        return _BUSY
                    await self._thread.run(lambda: self._replace(store, profile, used, loads))
            self._considered = state
        except (LeaseUnavailable, StoreError, PackInvalid) as error:
            log.info("the pack of %s is not written: %s", profile, error)
            return _BUSY
        return None

    def _has_enough(self, store: Store, profile: str, used: list[Use]) -> bool:
        """True if the pack that serves, or the newest, lists nearly all that the ranks have used; of a pinned profile, all."""
        serving = self._packs.get(profile)
        if serving is not None and not _lacking(serving, used):
            return True
        pinned = is_pinned(store.root, profile)
        earlier = self._earlier(store, profile, pinned)
        if earlier is None:
            return False
        with earlier:
            return self._is_enough(profile, earlier, used, pinned)

    def _is_enough(self, profile: str, earlier: Pack, used: list[Use], pinned: bool) -> bool:
        serving = self._packs.get(profile)
        pack = (
            serving if serving is not None and serving.place == earlier.place else earlier
        )  # the serving one knows its damaged artifacts
        enough = _lacking(pack, used) <= (0 if pinned else int(_ENOUGH * len(used)))
        if enough:
            self._packs.served(earlier.place.stem)
        return enough

    def _replace(self, store: Store, profile: str, used: list[Use], loads: frozenset[str]) -> None:
        """Write a pack, unless another agent has written one that is enough. Raises `StoreError` and `PackInvalid`."""
        pinned = is_pinned(store.root, profile)
        earlier = self._earlier(store, profile, pinned)
        try:
            if earlier is not None and self._is_enough(profile, earlier, used, pinned):
                return
            since = 0 if pinned else today() - USED_WITHIN
            uses = added(used, earlier, since=since, loaded=loads)
        finally:
            if earlier is not None:
                earlier.close()
        index = write_pack(store, profile, uses)
        log.info("the pack of %s was written: %d artifacts", profile, len(index.uses))

    def _earlier(self, store: Store, profile: str, pinned: bool) -> Pack | None:
        """The newest pack; close it. None also if it cannot be used: it is replaced, unless the profile is pinned.

        Raises `PackInvalid` then: nobody knows what the pin keeps.
        """
        try:
            return own_pack(store, profile)
        except PackInvalid as error:
            if pinned:
                raise
            log.info("the pack of %s is replaced: %s", profile, error)
            return None


def _lacking(pack: Pack, used: list[Use]) -> int:
    """The number of artifacts of `used` that the pack does not list, or has damaged."""
    listed = {use.digest for use in pack.index.uses} - pack.damaged
    return sum(use.digest not in listed for use in used)
