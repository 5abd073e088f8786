"""Retention in the store by its agents: bounds, the trash, old parts of profiles, and a count of what is there.

One agent of all makes a pass at a time, by a lease, and there is at most one pass an hour, by a stamp in the store. A pass counts
the store if there is a bound, or if metrics are served; its agent shows the result until the next passes of others are over.
"""

from __future__ import annotations

import functools
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
from kcoord.files.faults import fault_of
from kcoord.files.trash import Trash
from kcoord.leases.base import LeaseService, leased
from kcoord.retention.limits import Collected, Limits
from kcoord.retention.pins import kept_by_pins
from kcoord.retention.store_collector import collect, count
from kcoord.retention.tidying import tidy_parts
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices, log
from kcoord.units import bytes_text

FIRST = 600.0  # seconds; a job that has just begun has better things to do
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
        self._holdings: Holdings | None = None  # as the last pass of any agent found them
        self._thread = DiskThread("store-retention", low_priority=True)
        self.chores: list[Chore] = []
        if store is None:
            return
        make_pass, read = functools.partial(self._pass, store), functools.partial(self._read, store)
        passes = Chore("retention in the store", self._thread, make_pass, notices, first=FIRST, every=EVERY)
        self._reading = Chore("the store's holdings", self._thread, read, notices, first=READ_FIRST, every=READ_EVERY)
        self.chores = [passes, self._reading] if self._metered else [passes]

    def gauges(self) -> dict[str, float]:
        """The store's holdings and bounds, by the names of the metrics."""
        bounds, found = {"bytes": self._limits.max_size, "files": self._limits.max_files}, self._holdings
        is_latest = found is not None and time.time() - found.at < SHOWN
        return gauges_of("store", found if is_latest else None, bounds if self._has_store else {})

    async def _pass(self, store: Path) -> None:
        """One pass. After a failure another agent tries, an hour later."""
        try:
            if not await self._thread.run(lambda: _is_turn(store)):
                return
            async with leased(self._leases, _LEASE, self._token, self._ttl) as makes_pass:
                if makes_pass:  # else another agent does
                    await self._thread.run(lambda: self._collect(store))
                    if self._metered:
                        self._reading.begin()
        except LeaseUnavailable as error:
            log.info("garbage collection of the store failed: %s", error)
        except StoreError as error:
            self._notices.tell(f"garbage collection of the store failed: {error}", about=fault_of(store, error))

    async def _read(self, store: Path) -> None:
        try:
            found = await self._thread.run(lambda: read_holdings(store))
        except StoreError as error:  # the earlier figures stay, with their time
            log.info("the holdings of the store are not known: %s", error)
            return
        self._holdings = found or self._holdings

    def _collect(self, store: Path) -> None:
        """Raises `StoreError`."""
        if self._limits.any:
            found = collect(
                store, self._limits, pinned=kept_by_pins(store, self._trust).names, trust=self._trust, most=MOST
            )
            tell_collected("the store", found, self._notices)
            self._holdings = Holdings(*found.left, time.time())
            return
        with suppress(OSError):
            tidy_parts(store)
            Trash(store / LAYOUT / "trash", store).empty()  # of `kcoord gc`
        if self._metered:
            self._holdings = Holdings(*count(store).left, time.time())


def _is_turn(store: Path) -> bool:
    try:
        return is_turn(store / LAYOUT / "collected", EVERY)
    except OSError as error:
        log.info("garbage collection of the store failed: %s", error)
        return False


def tell_collected(where: str, found: Collected, notices: Notices) -> None:
    """Log how much a pass removed, and tell of artifacts that it may not remove."""
    if found.refused:
        notices.tell(
            f"{where}: its bound is not kept: of what was to go, {found.refused:,} may not be removed by this user: "
            "let all who use it be of one group, with umask 002", about=f"removing from {where}",
        )  # fmt: skip
    if found.removed:
        size = bytes_text(found.removed_size)
        log.info("%s: %d artifacts (%s) that were used longest ago were removed", where, len(found.removed), size)


def gauges_of(where: str, holdings: Holdings | None, bounds: Mapping[str, int | None]) -> dict[str, float]:
    """Holdings and bounds as metrics, of the ``store`` or the ``local`` directory."""
    found = {f"kcoord_{where}_max_{unit}": float(bound) for unit, bound in bounds.items() if bound is not None}
    if holdings is not None:
        found[f"kcoord_{where}_artifacts"] = float(holdings.artifacts)
        found[f"kcoord_{where}_bytes"] = float(holdings.size)
        found[f"kcoord_{where}_files"] = float(holdings.files)
        found[f"kcoord_{where}_counted_timestamp_seconds"] = holdings.at
    return found
