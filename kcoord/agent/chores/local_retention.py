"""The bound of this node's local directory, which its agent keeps."""

from __future__ import annotations

import time
from pathlib import Path

from kcoord.agent.chores.chore import Chore, Lane
from kcoord.agent.chores.store_retention import MOST, gauges_of, tell_collected
from kcoord.errors import StoreError
from kcoord.retention.holdings import Holdings
from kcoord.retention.limits import Limits
from kcoord.retention.local_collector import collect_local
from kcoord.retention.pinned import pinned_needs
from kcoord.telemetry.events import Notices

FIRST = 600.0  # seconds; a job that has just begun has better things to do
EVERY = 3600.0


class LocalRetention:
    """Removes artifacts from `local_dir` while they take more than `max_size` bytes (None: no bound); pinned ones stay.

    Not guaranteed: that the bound is kept at every moment.
    """

    def __init__(self, local_dir: Path, max_size: int | None, store: Path | None, notices: Notices) -> None:
        self._local_dir, self._max_size, self._store, self._notices = local_dir, max_size, store, notices
        self._holdings: Holdings | None = None  # after the last pass
        self._lane = Lane("local-retention", low_priority=True)
        chore = Chore("the bound of the local directory", self._lane, self._pass, notices, first=FIRST, every=EVERY)
        self.chores = [chore] if max_size is not None else []

    def gauges(self) -> dict[str, float]:
        """The local directory's holdings and bound, by the names of the metrics."""
        return gauges_of("local", self._holdings, {"bytes": self._max_size})

    async def _pass(self) -> None:
        try:
            self._holdings = await self._lane.run(self._collect)
        except StoreError as error:
            self._notices.tell(f"KCOORD_LOCAL_MAX_SIZE is not kept: {error}", about="the bound of the local directory")

    def _collect(self) -> Holdings:
        """Raises `StoreError`."""
        places = {need.place for need in pinned_needs(self._store)} if self._store is not None else set()
        found = collect_local(self._local_dir, Limits(max_size=self._max_size), pinned=places, most=MOST)
        tell_collected("the local directory", found, self._notices)
        return Holdings(*found.left, time.time())
