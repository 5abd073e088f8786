"""The bound of this node's local directory, which its agent keeps."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from kcoord.agent.chores.chore import Chore, DiskThread
from kcoord.agent.chores.store_retention import MOST, gauges_of, tell_collected
from kcoord.artifacts.signing import OFF, Trust
from kcoord.default_dir import cache_directory
from kcoord.errors import StoreError
from kcoord.files.faults import store_errors
from kcoord.retention.limits import LOCAL_BOUND, LOCAL_SHARE, Limits
from kcoord.retention.local_collector import collect_local
from kcoord.retention.pins import kept_by_pins
from kcoord.telemetry.events import Notices

FIRST = 600.0  # seconds; a job that has just begun has better things to do
EVERY = 3600.0


class LocalRetention:
    """Removes artifacts from `local_dir` while they take more than `max_size` bytes; pinned ones stay.

    None: no bound, but in the user's cache directory 10 GiB, or 5 % of the file system if that is less. Then the store, which
    knows the pins, is asked only if there is more.
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
        chore = Chore("the bound of the local directory", self._thread, self._pass, notices, first=FIRST, every=EVERY)
        self.chores = [chore] if max_size is not None or cache_directory() in (local_dir, local_dir.parent) else []

    def gauges(self) -> dict[str, float]:
        """The local directory's holdings and bound, by the names of the metrics, after the first pass."""
        return gauges_of("local", self._holdings, {"bytes": self._bound})

    async def _pass(self) -> None:
        try:
            self._holdings = await self._thread.run(self._collect)
        except StoreError as error:
            self._notices.tell(f"KCOORD_LOCAL_MAX_SIZE is not kept: {error}", about="the bound of the local directory")

    def _collect(self) -> Holdings:
        """Raises `StoreError`."""
        if self._max_size is None:
            with store_errors(self._local_dir):
                total = shutil.disk_usage(self._local_dir).total
            self._bound = min(LOCAL_BOUND, int(total * LOCAL_SHARE) or LOCAL_BOUND)
            there = Holdings(*collect_local(self._local_dir, Limits(), dry_run=True).left, time.time())
            if there.size <= self._bound:
                return there
        places = kept_by_pins(self._store, self._trust).places if self._store is not None else set()
        found = collect_local(self._local_dir, Limits(max_size=self._bound), pinned=places, most=MOST)
        tell_collected("the local directory", found, self._notices)
        return Holdings(*found.left, time.time())
