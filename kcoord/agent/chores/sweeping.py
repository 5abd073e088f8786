"""Removes old files: those that dead processes left in staging directories, of the store and this node, and old time lines."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from kcoord.agent.chores.chore import Chore, DiskThread
from kcoord.errors import StoreError
from kcoord.files.atomic import LAYOUT
from kcoord.files.private import check_tier
from kcoord.files.sweep import sweep
from kcoord.telemetry import span_files
from kcoord.telemetry.events import Notices, log

FIRST_IN_STORE = (
    60.0  # seconds; the first sweep comes at a random moment within these, since a job's nodes start together
)
EVERY_IN_STORE, EVERY_HERE = 3600.0, 600.0  # seconds


class Sweeper:
    """``homes()``: where artifacts landed on this node. Each local tier around one is swept, and those below `local_dir`.

    Not guaranteed: that anything is removed, only that nothing of a living process is.
    """

    def __init__(
        self, store: Path | None, local_dir: Path, notices: Notices, homes: Callable[[], Iterable[str]]
    ) -> None:
        self._local_dir, self._homes = local_dir, homes
        thread = self._thread = DiskThread("sweep")
        self.chores = [Chore("sweeping the local tiers", thread, self._sweep_tiers, notices, every=EVERY_HERE)]
        if store is not None:
            thread, first = DiskThread("sweep-store"), FIRST_IN_STORE * random.random()
            sweep_store = thread.doing(lambda: _logged(lambda: _remove_stale_in(store)))
            self.chores.append(
                Chore("sweeping the store", thread, sweep_store, notices, first=first, every=EVERY_IN_STORE)
            )

    async def _sweep_tiers(self) -> None:
        seen = {os.path.dirname(home) for home in self._homes()}  # noqa: PTH120 - there may be 20,000
        await self._thread.run(lambda: _logged(lambda: self._remove_stale(seen)))

    def _remove_stale(self, seen: set[str]) -> int:
        span_files.forget_old(self._local_dir)
        own = [path.parent for path in self._local_dir.glob("*/.kcoord")]
        tiers = {str(path) for path in (*own, *self._local_dir.glob("objects/??"))} | seen
        stagings = [(Path(tier, ".kcoord", "staging"), Path(tier)) for tier in sorted(tiers)]
        removed = 0
        for staging, root in [*stagings, (self._local_dir / "toolchain", self._local_dir)]:
            with suppress(OSError, StoreError):  # a disk that takes no writes, or is others' too, keeps what is there
                check_tier(root)
                removed += sweep(staging, root)
        return removed


def _remove_stale_in(store: Path) -> int:
    return sweep(store / LAYOUT / "staging", store) if is_turn(store / LAYOUT / "swept", EVERY_IN_STORE) else 0


def _logged(work: Callable[[], int]) -> None:
    try:
        removed = work()
    except OSError as error:
        log.info("nothing was swept: %s", error)
        return
    if removed:
        log.info("%d stale staging directories were removed", removed)


def is_turn(stamp: Path, every: float) -> bool:
    """Touch `stamp` unless that was done in the last ``every / 2`` seconds by the store's clock; True then. Raises OSError."""
    try:
        before = stamp.stat().st_mtime
    except FileNotFoundError:
        before = None
    os.close(os.open(stamp, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))
    os.utime(stamp.parent)
    now = stamp.parent.stat().st_mtime
    if before is not None and 0 <= now - before < every / 2:
        return False
    os.utime(stamp)
    return True
