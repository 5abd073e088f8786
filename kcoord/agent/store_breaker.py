"""A circuit breaker for the store. It tells the user of the first outage of each kind, and of its end.

An *outage* begins with the first use that fails, and ends when a probe, in the background, has written to the store. During an
outage whose uses fail at once (the store is full, read-only, gone) each use is tried: a store that can be read and not written
serves artifacts. A use that gets no answer pauses all others, which return at once until the outage ends.
An artifact that is not published meanwhile stays on this node.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kcoord.artifacts.store import Store
from kcoord.errors import StoreError
from kcoord.files.bounded_threads import BoundedThreads, Paused, Silent, in_thread
from kcoord.files.faults import fault_of
from kcoord.leases.base import within
from kcoord.telemetry.events import Notices, tell_if_failed

T = TypeVar("T")


class StoreBreaker:
    """One agent's use of `store`, which may be None. One whose `open` has not returned yet is opened by the probe.

    `patience`: seconds that one use may take; an NFS server's restart takes 20. `abreast`: uses at a time. `probes`: seconds
    between the first two probes of an outage, and between the last two. `looks_within`: seconds of `takes_artifacts`. The
    store is not used again while it holds `most_stuck` threads or more.
    """

    def __init__(
        self,
        store: Store | None,
        notices: Notices,
        *,
        patience: float = 60.0,
        abreast: int = 8,
        probes: tuple[float, float] = (1.0, 15.0),
        looks_within: float = 2.0,
        most_stuck: int = 200,
    ) -> None:
        self._store, self._notices, self.exists = store, notices, store is not None
        self._probes, self._looks_within, self._most_stuck = probes, looks_within, most_stuck
        self.root = store.root if store is not None else Path()
        self._threads = BoundedThreads(self.root, abreast=abreast, patience=patience)
        self._threads.paused = store is not None and not store.opened
        self.faulty = store is not None and (not store.opened or store.reads_only is not None)
        """True during an outage: artifacts of this node do not get into the store."""
        self.changes = int(self.faulty)
        """Beginnings and ends of outages."""
        self._fault = ""  # of the last outage
        self._overdue: set[asyncio.Task[Any]] = set()  # bounded uses whose callers went on without them
        self._probing: asyncio.Task[None] | None = None

    async def use(self, work: Callable[[Store], T]) -> T | None:
        """The result of ``work(store)``; None if there is no store, or it fails or hangs, now or since another use.

        Raises any other exception of `work` than `StoreError`. Not guaranteed: a bound on the wait for a turn, while the store
        answers other uses; that `work` ends when this does, for its thread goes on.
        """
        store = self._store
        if store is None:
            return None
        if self._threads.paused:
            self._probe(store)
            return None
        began = self.changes
        try:
            return await self._threads.run(functools.partial(work, store))
        except Paused:
            return None
        except StoreError as error:
            self._failed(store, error, began)
            return None

    async def use_within(self, work: Callable[[Store], T], seconds: float) -> T | None:
        """As `use`, but after `seconds` its caller goes on with None, which begins no outage. While such a use is overdue, other
        bounded uses return None at once.
        """
        if self._store is None or self._overdue:
            return None
        use = asyncio.create_task(self.use(work))
        use.add_done_callback(self._came)
        await asyncio.wait({use}, timeout=seconds)
        if use.done():
            return use.result()
        self._overdue.add(use)
        return None

    async def takes_artifacts(self) -> bool:
        """True if the store takes artifacts, or does not answer a probe within seconds."""
        if not self.faulty:
            await self.use_within(lambda store: store.check(), self._looks_within)
        return not self.faulty

    def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
        self._store = None
        self._threads.close()

    def _came(self, use: asyncio.Task[Any]) -> None:
        self._overdue.discard(use)
        if not use.cancelled():
            use.exception()  # seen, though nobody may wait for it

    def _failed(self, store: Store, error: StoreError, began: int) -> None:
        """A use failed that began after `began` changes. If there were others since, its outage is over, unless it hung."""
        if not self.faulty and (began == self.changes or isinstance(error, Silent)):
            self.faulty = True
            self.changes += 1
            self._fault = fault_of(store.root, error)
            self._notices.tell(fault_line(store, error), about=self._fault)
        if self.faulty:
            self._probe(store)

    def _probe(self, store: Store) -> None:
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._recovery(store))
            # after an unexpected error the next use that fails begins another probe
            self._probing.add_done_callback(
                functools.partial(tell_if_failed, consequence="the store was not looked at", tell=self._notices.tell)
            )

    async def _recovery(self, store: Store) -> None:
        """Probe the store until it takes artifacts, and end the outage."""
        pause, longest = self._probes
        while True:
            await asyncio.sleep(pause * random.uniform(0.9, 1.1))
            pause = min(2 * pause, longest)
            try:
                await in_thread(store.check if store.opened else functools.partial(_open, store))  # as long as it takes
            except StoreError:
                continue
            if self._threads.stuck < self._most_stuck:
                break
        self.faulty = self._threads.paused = False
        self.changes += 1
        self._notices.tell(
            f"the store {store.root} is back: artifacts are published there again", about=f"the end of {self._fault}"
        )


def fault_line(store: Store, error: StoreError) -> str:
    """The notice of a store that cannot be used, or only be read."""
    if store.opened and store.reads_only is not None:
        return f"the store {store.root} is only read: {error.remedy}; its artifacts are used, and this node's stay here"
    return f"the store cannot be used: {store.root}: {error.remedy}; training goes on, and artifacts stay on this node"


def _open(store: Store) -> None:
    store.open()
    store.check()


async def opened(store: Store, patience: float, notices: Notices) -> None:
    """Open `store` within `patience` seconds; if that fails it is told, and a `StoreBreaker` goes on trying."""
    fault: StoreError
    try:
        await within(patience, in_thread(store.open))
    except StoreError as error:
        fault = error
    except TimeoutError:
        fault = Silent(store.root, patience)
    else:
        if store.reads_only is None:
            return
        fault = store.reads_only
    notices.tell(fault_line(store, fault), about=fault_of(store.root, fault))
