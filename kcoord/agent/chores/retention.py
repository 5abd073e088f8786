"""Keeps the bounds of the store and of this node's local directory.

In the store a pass also empties the trash and removes old parts of profiles. One agent of all makes a pass at a time, by a lease,
and there is at most one pass an hour, by a stamp in the store. A pass counts the store if there is a bound, or if metrics are
served; its agent shows the result until the next passes of others are over.
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kcoord.agent.chores.chore import Chore, DiskThread
from kcoord.agent.chores.sweeping import is_turn
from kcoord.artifacts.signing import OFF, Trust
from kcoord.errors import LeaseUnavailable, StoreError
from kcoord.files.atomic import LAYOUT
from kcoord.files.faults import fault_of, store_errors
from kcoord.files.trash import Trash
from kcoord.leases.base import LeaseService, leased
from kcoord.retention.limits import LOCAL_BOUND, LOCAL_SHARE, Collected, Limits
from kcoord.retention.local_collector import collect_local, is_users_cache
from kcoord.retention.pins import kept_by_pins
from kcoord.retention.store_collector import collect, count
from kcoord.retention.tidying import tidy_parts
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices, log
from kcoord.units import bytes_text

FIRST = 600.0  # seconds; a job that has just begun has better things to do
LOCAL_FIRST = 60.0  # seconds; where all jobs are short none would look
EVERY = 3600.0
SHOWN = 2 * EVERY  # the result of a pass
MOST = 2000  # artifacts of one pass
_LEASE = "gc"


@dataclass(frozen=True)
class Holdings:
    """The result of a pass: `size` in bytes, in whole blocks; `files` are files and directories; `at`: Unix seconds."""

    artifacts: int
    size: int
    files: int
    at: float


class StoreRetention:
    """Passes over the store, if there is one. Not guaranteed: that a bound is kept at every moment."""

    def __init__(
        self, store: Path | None, settings: Settings, leases: LeaseService, agent: str, notices: Notices,
        trust: Trust = OFF,
    ) -> None:  # fmt: skip
        self._leases, self._token, self._ttl, self._notices = leases, f"{agent}.gc", settings.lease_ttl, notices
        self._trust, self._metered = trust, settings.metrics is not None
        self._limits = Limits(
            max_size=settings.store_max_size, max_files=settings.store_max_files, unused_for=settings.store_unused_for
        )
        self._has_store = store is not None
        self._holdings: Holdings | None = None  # after this agent's last pass
        self._thread = DiskThread("store-retention", low_priority=True)
        self.chores: list[Chore] = []
        if store is None:
            return
        make_pass = functools.partial(self._pass, store)
        self.chores = [Chore("retention in the store", self._thread, make_pass, notices, first=FIRST, every=EVERY)]

    def gauges(self) -> dict[str, float]:
        """The store's holdings and bounds, by the names of the metrics."""
        bounds, found = {"bytes": self._limits.max_size, "files": self._limits.max_files}, self._holdings
        is_latest = found is not None and time.time() - found.at < SHOWN
        return _gauges_of("store", found if is_latest else None, bounds if self._has_store else {})

    async def _pass(self, store: Path) -> None:
        """One pass. After a failure another agent tries, an hour later."""
        try:
            if not await self._thread.run(lambda: is_turn(store / LAYOUT / "collected", EVERY)):
                return
            async with leased(self._leases, _LEASE, self._token, self._ttl) as makes_pass:
                if makes_pass:  # else another agent does
                    await self._thread.run(lambda: self._collect(store))
        except (LeaseUnavailable, OSError) as error:
            log.info("garbage collection of the store failed: %s", error)
        except StoreError as error:
            self._notices.tell(f"garbage collection of the store failed: {error}", about=fault_of(store, error))

    def _collect(self, store: Path) -> None:
        """Raises `StoreError`."""
        if self._limits.any:
            found = collect(
                store, self._limits, pinned=kept_by_pins(store, self._trust).names, trust=self._trust, most=MOST
            )
            _tell_collected("the store", found, self._notices)
            self._holdings = Holdings(*found.left, time.time())
            return
        with suppress(OSError):
            tidy_parts(store)
            Trash(store / LAYOUT / "trash", store).empty()  # of `kcoord gc`
        if self._metered:
            self._holdings = Holdings(*count(store).left, time.time())


class LocalRetention:
    """Removes artifacts from `local_dir` while they take more than `max_size` bytes; pinned ones stay.

    None: no bound, but in the user's cache directory 10 GiB, or 5 % of the file system if that is less. Then the store, which
    knows the pins, is asked only if there is more. In the user's cache directory compilers' own caches count, and go, too.
    Not guaranteed: that the bound is kept at every moment.
    """

    def __init__(
        self, local_dir: Path, max_size: int | None, store: Path | None, notices: Notices, trust: Trust = OFF
    ) -> None:
        self._local_dir, self._max_size, self._store, self._notices = local_dir, max_size, store, notices
        self._trust = trust
        self._bound = max_size
        self._holdings: Holdings | None = None  # after the last pass
        self._thread = DiskThread("local-retention", low_priority=True)
        about = "the bound of the local directory"
        chore = Chore(about, self._thread, self._pass, notices, first=LOCAL_FIRST, every=EVERY)
        self.chores = [chore] if max_size is not None or is_users_cache(local_dir) else []

    def gauges(self) -> dict[str, float]:
        """The local directory's holdings and bound, by the names of the metrics, after the first pass."""
        return _gauges_of("local", self._holdings, {"bytes": self._bound})

    async def _pass(self) -> None:
        try:
            if await self._thread.run(self._is_turn):
                self._holdings = await self._thread.run(self._collect)
        except StoreError as error:
            self._notices.tell(f"KCOORD_LOCAL_MAX_SIZE is not kept: {error}", about="the bound of the local directory")

    def _is_turn(self) -> bool:
        with suppress(OSError):  # a full disk is looked at, too
            return is_turn(self._local_dir / "collected", EVERY)
        return True

    def _collect(self) -> Holdings:
        """Raises `StoreError`."""
        if self._max_size is None:
            with store_errors(self._local_dir):
                total = shutil.disk_usage(self._local_dir).total
            self._bound = min(LOCAL_BOUND, int(total * LOCAL_SHARE) or LOCAL_BOUND)
            collect_local(self._local_dir, Limits())  # the trash of earlier passes
            looked = collect_local(self._local_dir, Limits(), dry_run=True)
            there = Holdings(*looked.left, time.time())
            if there.size <= self._bound:
                return there
        places = kept_by_pins(self._store, self._trust).places if self._store is not None else set()
        limits = Limits(max_size=self._bound)
        found = collect_local(self._local_dir, limits, pinned=places, most=MOST)
        _tell_collected("the local directory", found, self._notices)
        return Holdings(*found.left, time.time())


def _tell_collected(where: str, found: Collected, notices: Notices) -> None:
    """Log how much a pass removed, and tell of artifacts that it may not remove."""
    if found.refused:
        notices.tell(
            f"{where}: its bound is not kept: of what was to go, {found.refused:,} may not be removed by this user: "
            "let all who use it be of one group, with umask 002", about=f"removing from {where}",
        )  # fmt: skip
    if found.removed:
        size = bytes_text(found.removed_size)
        log.info("%s: %d artifacts (%s) that were used longest ago were removed", where, len(found.removed), size)


def _gauges_of(where: str, holdings: Holdings | None, bounds: Mapping[str, int | None]) -> dict[str, float]:
    """Holdings and bounds as metrics, of the ``store`` or the ``local`` directory."""
    found = {f"kcoord_{where}_max_{unit}": float(bound) for unit, bound in bounds.items() if bound is not None}
    if holdings is not None:
        found[f"kcoord_{where}_artifacts"] = float(holdings.artifacts)
        found[f"kcoord_{where}_bytes"] = float(holdings.size)
        found[f"kcoord_{where}_files"] = float(holdings.files)
        found[f"kcoord_{where}_counted_timestamp_seconds"] = holdings.at
    return found
