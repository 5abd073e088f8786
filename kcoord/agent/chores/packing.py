"""The pack of this agent's profile, written by one agent of the job once its ranks have used much that the newest pack lacks.

One agent at a time writes, by a lease. The next one finds that pack, and adds what its own ranks have used, if that is much: so
the pack of a job whose nodes run different stages holds the kernels of all. An artifact that no job has used for some days is not
in the next pack. An agent therefore notes the uses of its ranks before it writes.

In a large cluster the first packs are written while the job still compiles (`kcoord.agent.early_packs`).

Not guaranteed: that a pack holds one job's artifacts alone. An agent of several jobs packs what all of them use.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kcoord.agent.chores.chore import REST, Chore, Lane
from kcoord.agent.early_packs import FEWEST, EarlyPacks, lease_of
from kcoord.agent.packs import Packs
from kcoord.artifacts.store import Store
from kcoord.errors import LeaseUnavailable, StoreError
from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT
from kcoord.files.faults import store_errors
from kcoord.leases.base import LeaseService, leased
from kcoord.profiles.packs import usable_packs
from kcoord.retention.uses import load_uses, note_uses, prefix_of
from kcoord.telemetry.events import Notices, log
from kcoord.transfer.pack import Pack, PackUnused, look_at_pack, write_pack

_ENOUGH = 0.1  # of what the ranks have used; a pack that lacks more is replaced
_QUIET = 30.0  # seconds without a new artifact: the job has what it needs
_EVERY = 60.0  # seconds between two attempts
_USED_WITHIN = 10 * 86400.0  # seconds; a job may run once a week


@dataclass(frozen=True)
class _Newest:
    """A pack of the profile: its file, the file's modification time, and the keys of its artifacts."""

    place: Path
    written: float
    digests: frozenset[str]


@dataclass(frozen=True)
class _Attempt:
    """To write a pack of the artifacts `used`, unless the newest one lacks no more than `may_lack` of them.

    `earlier` and `within` as `write_pack` takes them.
    """

    used: list[str]
    may_lack: int
    earlier: Pack | None = None
    within: float = math.inf


class PackWriter:
    """Writes the pack of `profile`, which the agent's settings name. A loss harms no job: no method raises for a disk's sake."""

    def __init__(
        self, store: Store | None, profile: str | None, packs: Packs, early: EarlyPacks, leases: LeaseService, agent: str,
        ttl: float, notices: Notices,
    ) -> None:  # fmt: skip
        self._packs, self._early, self._leases = packs, early, leases
        self._token, self._ttl = f"{agent}.pack", ttl
        self._read: Pack | None = None  # as the job began; it may be damaged
        self._newest: _Newest | None = None  # written since, by this agent or another
        self._considered = 0  # `Packs.noted`, of the keys that the newest pack was compared with
        self._count, self._since = 0, time.monotonic()  # `Packs.noted`, and when it last grew
        self._lane = Lane("packing")
        self.chores: list[Chore] = []
        if store is not None and profile is not None and store.trust.publishes:
            write = functools.partial(self._write, store, profile)
            wanted = functools.partial(self._is_wanted, profile)
            chore = Chore(
                "the job's pack", self._lane, write, notices, every=_EVERY, rest=REST, wanted=wanted, last=write
            )
            self.chores, early.write = [chore], chore.hasten

    def _is_wanted(self, profile: str) -> bool:
        self._read = self._read or self._packs.get(profile)
        count, now = self._packs.noted, time.monotonic()
        if count != self._count:
            self._count, self._since = count, now
        return (count != self._considered and now > self._since + _QUIET) or bool(self._early.wanted())

    async def _write(self, store: Store, profile: str) -> None:
        """One attempt. If another agent writes, or a disk or a service fails, there is another one."""
        early, noted = self._early.wanted(), self._packs.noted
        if early:
            attempt = _Attempt(early, FEWEST - 1, self._packs.get(profile), self._early.gathered_within)
        else:
            used = list(self._packs.seen)
            attempt = _Attempt(used, int(_ENOUGH * len(used)))
        if not attempt.used or self._packs.is_unread(profile):
            return
        begun = time.monotonic()
        self._read = self._read or self._packs.get(profile)
        try:
            if not (early or _is_enough(attempt, self._known())):  # but another agent may have written
                self._newest = await self._lane.run(lambda: self._look(store, profile))
            if _is_enough(attempt, self._known()) or await self._replaced(store, profile, attempt):
                if early:
                    self._early.wrote(early, self._newest.digests if self._newest is not None else ())
                else:
                    self._considered = noted
                if self._newest is not None:
                    self._packs.served(self._newest.place.stem)
        except (LeaseUnavailable, StoreError) as error:
            if early:
                self._early.failed(time.monotonic() - begun)
            log.info("the pack of %s is not written: %s", profile, error)

    async def _replaced(self, store: Store, profile: str, attempt: _Attempt) -> bool:
        """False: another agent writes. Raises `LeaseUnavailable`, `StoreError`."""
        async with leased(self._leases, lease_of(profile), self._token, self._ttl) as writes:
            if writes:
                self._newest = await self._lane.run(lambda: self._replace(store, profile, attempt))
        return writes

    def _known(self) -> _Newest | None:
        if self._newest is not None or self._read is None:
            return self._newest
        return _Newest(self._read.place, self._read.written, self._read.digests)

    def _replace(self, store: Store, profile: str, attempt: _Attempt) -> _Newest | None:
        """Write a pack, unless another agent has written one that is enough; the newest then. Raises `StoreError`."""
        newest = self._look(store, profile)
        if newest is not None and _is_enough(attempt, newest):
            return newest
        note_uses(store.root, [prefix_of(digest) for digest in attempt.used])
        digests = [*attempt.used, *self._still_used(store, newest, set(attempt.used))]
        written = write_pack(store, profile, digests, earlier=attempt.earlier, within=attempt.within)
        log.info("the pack of %s was written: %d artifacts", profile, len(written))
        return self._look(store, profile)

    def _look(self, store: Store, profile: str) -> _Newest | None:
        """The newest pack of just this profile, without what this agent knows to be damaged; None also if it cannot be used."""
        with store_errors(store.root):
            for place in usable_packs(store.root, profile, store.trust)[:1]:
                known, written = self._known(), place.stat().st_mtime
                if known is not None and (known.place, known.written) == (place, written):
                    return known
                try:
                    return _Newest(place, written, look_at_pack(store, place))
                except PackUnused as error:
                    log.info("the pack of %s is replaced: %s", profile, error)
        return None

    def _still_used(self, store: Store, newest: _Newest | None, used: Collection[str]) -> list[str]:
        """The other artifacts of a pack that jobs have used lately, the last used first. Raises `StoreError`."""
        if newest is None or newest.digests <= set(used):
            return []
        with store_errors(store.root):
            now = beneath.touched(store.root / LAYOUT, store.root)
        uses = load_uses(store.root)
        ages = {digest: now - uses.get(prefix_of(digest), 0.0) for digest in newest.digests.difference(used)}
        return sorted(
            (digest for digest in ages if ages[digest] < _USED_WITHIN), key=lambda digest: (ages[digest], digest)
        )


def _is_enough(attempt: _Attempt, newest: _Newest | None) -> bool:
    """False: a pack is to be written that has what `newest` lacks."""
    if newest is None:
        return len(attempt.used) < FEWEST
    return sum(digest not in newest.digests for digest in attempt.used) <= attempt.may_lack
