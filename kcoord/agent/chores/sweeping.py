"""When the agent removes what dead processes left in staging directories: of the store, and of this node's local tiers.

The store has a thread of its own here, and the local disk another one, which either may hold for ever: nothing else waits for it.
"""

from __future__ import annotations

import os
import random
import select
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from kcoord.files.sweep import sweep, sweep_left_by
from kcoord.telemetry.events import log

T = TypeVar("T")

FIRST_IN_STORE = 60.0  # seconds within which the store is swept first; a job's nodes start together
SECOND = 600.0
EVERY = 3600.0
_MOST_TIERS = 4096
_ENDS_WITHIN = 5.0  # seconds from the end of a socket to the end of its process


class Sweeper:
    """Every method returns at once. Not guaranteed: that anything is removed, only that nothing of a living process is."""

    def __init__(self, store: Path | None, local_dir: Path) -> None:
        self._store, self._local_dir = store, local_dir
        self._tiers: set[str] = set()
        self._landing: set[str] = set()
        self._local_io, self._store_io = ThreadPoolExecutor(1, "sweep"), ThreadPoolExecutor(1, "sweep-store")
        now = time.monotonic()
        self._local_at, self._local_next = now, SECOND
        self._store_at = now + FIRST_IN_STORE * random.random()
        self._under_way: dict[str, Future[int]] = {}

    def seen(self, home: str) -> None:
        """There is a local tier around `home`."""
        if len(self._tiers) < _MOST_TIERS:
            self._tiers.add(os.path.dirname(home))  # noqa: PTH120 - on every claim's way

    def sparing(self, staging: Path, publish: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
        """`publish`, whose `staging` stays from now until it has ended, whatever becomes of its owner."""
        self._landing.add(staging.name)

        async def spared() -> T:
            try:
                return await publish()
            finally:
                self._landing.discard(staging.name)

        return spared

    def ended(self, pid: int, home: str) -> None:
        """The connection of process `pid`, which led a compile for `home`, has ended. If the process has too, its files go."""
        self._local_io.submit(self._remove_left, pid, Path(home).parent / ".kcoord" / "staging")

    def pulse(self) -> None:
        """Begin what is due. Call it about once a second."""
        now = time.monotonic()
        if now >= self._local_at and self._begin("local", self._local_io, self._sweep_tiers):
            self._local_at, self._local_next = now + _about(self._local_next), EVERY
        if (
            self._store is not None
            and now >= self._store_at
            and self._begin("store", self._store_io, self._sweep_store)
        ):
            self._store_at = now + _about(EVERY)

    def close(self) -> None:
        self._local_io.shutdown(wait=False, cancel_futures=True)
        self._store_io.shutdown(wait=False, cancel_futures=True)

    def _begin(self, what: str, pool: ThreadPoolExecutor, work: Callable[[], int]) -> bool:
        """False: the last one has not ended."""
        before = self._under_way.get(what)
        if before is not None and not before.done():
            return False
        self._under_way[what] = pool.submit(_told, work)
        return True

    def _sweep_tiers(self) -> int:
        own = [path.parent for path in self._local_dir.glob("*/.kcoord")]
        tiers = {str(path) for path in (*own, *self._local_dir.glob("objects/??"))} | set(self._tiers)
        removed = 0
        for tier in sorted(tiers):
            with suppress(OSError):  # a disk that cannot be written keeps what is there
                removed += sweep(Path(tier, ".kcoord", "staging"))
        return removed

    def _sweep_store(self) -> int:
        """Raises OSError."""
        assert self._store is not None
        return sweep(self._store / "v1" / "staging") if is_turn(self._store / "v1" / "swept", EVERY) else 0

    def _remove_left(self, pid: int, staging: Path) -> int:
        if not _has_ended(pid, _ENDS_WITHIN):
            return 0
        return _told(lambda: sweep_left_by(staging, pid, frozenset(self._landing)))


def _told(work: Callable[[], int]) -> int:
    try:
        removed = work()
    except OSError as error:
        log.info("nothing was swept: %s", error)
        return 0
    if removed:
        log.info("%d stale staging directories were removed", removed)
    return removed


def is_turn(stamp: Path, every: float) -> bool:
    """Whether no node has touched `stamp` for half of `every` seconds, by the store's clock; then it is this one's turn.

    Raises OSError."""
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


def _has_ended(pid: int, within: float) -> bool:
    """Wait for the end of a process, which closes its sockets a moment before. False: it lives, or nobody can tell."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(within * 1000))
    finally:
        os.close(descriptor)


def _about(seconds: float) -> float:
    return seconds * random.uniform(0.8, 1.2)
