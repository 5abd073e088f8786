"""The agent's part of retention: it notes what is used, keeps the bounds that are set, empties the trash, merges old parts of
profiles, and knows for its metrics what there is.

Of all agents one at a time goes over the store, by a lease, and not more often than once an hour, by a stamp in the store. It
counts what is there if there is a bound, or metrics are served, and the others read what it counted.
The passes over the store, the local disk and the notes of use have a thread each, which a disk may hold for ever: nothing else
waits for it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import platform
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from kcoord.agent.chores.sweeping import is_turn
from kcoord.artifacts.signing import OFF, Trust
from kcoord.errors import LeaseUnavailable, StoreError
from kcoord.files.faults import (
    fault_of,
)
from kcoord.files.sweep import lives
from kcoord.files.trash import Trash
from kcoord.leases.base import Lease, LeaseService
from kcoord.profiles.compaction import compact, compact_needs
from kcoord.retention.holdings import Holdings, read_holdings
from kcoord.retention.limits import Limits
from kcoord.retention.local_collector import collect_local
from kcoord.retention.pinned import pinned_digests, pinned_needs
from kcoord.retention.store_collector import Collected, collect, count
from kcoord.retention.uses import MOST_USES, note_uses, prefix_of
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices, log
from kcoord.units import bytes_text

T = TypeVar("T")

FIRST = 600.0  # seconds; a job that has just begun has better things to do
EVERY = 3600.0
READ_FIRST, READ_EVERY = 60.0, 600.0  # what another agent has counted: one small file
NOTED_FIRST, NOTED_EVERY = 1800.0, 86400.0
_MOST = 2000  # artifacts of one pass, and parts of profiles, and files of needs
_PROCESSES = 64  # of which it is not looked at once whether they live
_LEASE = "gc"


class Keeper:
    """No method raises for a disk's sake, and only `drain` waits. Not guaranteed: that a bound is kept at every moment."""

    def __init__(
        self, store: Path | None, settings: Settings, leases: LeaseService, agent: str, notices: Notices,
        trust: Trust = OFF,
    ) -> None:  # fmt: skip
        self._store, self._settings, self._leases, self._agent, self._notices = store, settings, leases, agent, notices
        self._trust = trust
        self._limits = Limits(
            max_size=settings.store_max_size, max_files=settings.store_max_files, unused_for=settings.store_unused_for
        )
        self._held: dict[str, Holdings] = {}  # by whose: "store", "local"
        self._used: dict[bytes, None] = {}  # and not noted since
        self._used_by: dict[int, set[bytes]] = {}  # what each process has ever used, and may hold in memory
        self._most_processes = _PROCESSES
        self._not_noted: list[bytes] = []  # what a disk refused, as its thread left it
        threads = {"store": "keeper-store", "local": "keeper", "notes": "keeper-notes"}
        self._io = {what: ThreadPoolExecutor(1, name) for what, name in threads.items()}
        self._noting: Future[None] | None = None
        self._passes: dict[str, asyncio.Task[None]] = {}
        now = time.monotonic()
        self._note_at = now + _about(NOTED_FIRST)
        self._due = {"store": now + _about(FIRST), "local": now + _about(FIRST), "held": now + _about(READ_FIRST)}

    def used(self, digests: Iterable[str], pid: int) -> None:
        """The process `pid` of this node (0: nobody knows) asked for these, or loaded them; 16 digits of each are enough.

        They are in use for as long as it lives. What is no digest is ignored.
        """
        if self._store is None:
            return
        if pid not in self._used_by and len(self._used_by) >= self._most_processes:
            self._forget_the_ended()
            self._most_processes = 2 * len(self._used_by) + _PROCESSES
        mine = self._used_by.setdefault(pid, set())
        for digest in digests:
            with suppress(ValueError):
                prefix = prefix_of(digest)
                if len(self._used) < MOST_USES:
                    self._used.setdefault(prefix)
                if len(mine) < MOST_USES:
                    mine.add(prefix)

    def pulse(self) -> None:
        """Begin what is due. Call it about once a second."""
        now = time.monotonic()
        if self._store is not None and now >= self._note_at and (self._noting is None or self._noting.done()):
            self._note_at = now + _about(NOTED_EVERY)
            self._forget_the_ended()
            self._note({*self._used, *self._not_noted, *chain.from_iterable(self._used_by.values())})
        if self._store is not None:
            self._begin("store", self._keep_store, now)
            if self._settings.metrics is not None:
                self._begin("held", self._read_held, now, READ_EVERY)
        if self._settings.local_max_size is not None:
            self._begin("local", self._keep_local, now)

    def vitals(self) -> dict[str, float]:
        """What there is as the last pass found it, and the bounds that are set, by the names of the metrics."""
        found: dict[str, float] = {}
        for whose, held in self._held.items():
            found[f"kcoord_{whose}_artifacts"] = float(held.artifacts)
            found[f"kcoord_{whose}_bytes"] = float(held.size)
            found[f"kcoord_{whose}_files"] = float(held.files)
            found[f"kcoord_{whose}_counted_timestamp_seconds"] = held.at
        bounds = {"kcoord_local_max_bytes": self._settings.local_max_size}
        if self._store is not None:
            bounds |= {
                "kcoord_store_max_bytes": self._limits.max_size,
                "kcoord_store_max_files": self._limits.max_files,
            }
        return found | {name: float(bound) for name, bound in bounds.items() if bound is not None}

    async def drain(self, timeout: float) -> None:
        """Note what was used and is not noted yet, within `timeout` seconds; a pass that is under way ends in the middle."""
        for task in self._passes.values():
            task.cancel()
        if self._used or self._not_noted:
            self._note({*self._used, *self._not_noted})
        if self._noting is not None:
            _, late = await asyncio.wait({asyncio.wrap_future(self._noting)}, timeout=timeout)
            if late:
                log.info("what was used was not noted within %g s", timeout)
        for pool in self._io.values():
            pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.gather(*self._passes.values(), return_exceptions=True)

    def _forget_the_ended(self) -> None:
        """Or an agent that serves one job after the other would keep all that was ever used in use."""
        self._used_by = {pid: used for pid, used in self._used_by.items() if pid == 0 or lives(pid)}

    def _note(self, prefixes: Iterable[bytes]) -> None:
        self._noting = self._io["notes"].submit(self._write, list(prefixes))
        self._used = {}

    def _write(self, prefixes: list[bytes]) -> None:
        assert self._store is not None
        try:
            note_uses(self._store, prefixes)
            self._not_noted = []
        except StoreError as error:
            self._not_noted = prefixes
            self._notices.tell(f"what is used is not noted: {error}", about=fault_of(self._store, error))

    def _begin(
        self, what: str, work: Callable[[], Coroutine[Any, Any, None]], now: float, every: float | None = None
    ) -> None:
        before = self._passes.get(what)
        if now < self._due[what] or (before is not None and not before.done()):
            return
        self._due[what] = now + _about(EVERY if every is None else every)
        task = self._passes[what] = asyncio.create_task(work())
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._notices.tell(f"an error in the agent, please report it: {type(error).__name__}: {error}")
            log.error("a pass of garbage collection failed", exc_info=error)

    async def _keep_store(self) -> None:
        """Whatever goes wrong: an hour later another agent tries."""
        assert self._store is not None
        token, ttl = f"{self._agent}.gc", self._settings.lease_ttl
        try:
            if not await self._in("store", self._is_turn):
                return
            lease = await self._leases.acquire(_LEASE, token, platform.node())
            if not isinstance(lease, Lease):
                return  # another agent is at it
            lease.keep_alive(ttl)
            try:
                await self._in("store", self._compact)
                await self._in("store", self._collect)
                self._due["held"] = 0.0
            finally:
                await lease.release()
        except LeaseUnavailable as error:
            log.info("the store was not looked through: %s", error)
        except StoreError as error:
            self._notices.tell(f"the store is not looked through: {error}", about=fault_of(self._store, error))

    async def _read_held(self) -> None:
        assert self._store is not None
        try:
            found = await self._in("store", functools.partial(read_holdings, self._store))
        except StoreError as error:  # what was known stays, with its time
            log.info("what the store holds is not known: %s", error)
            return
        if found is not None:
            self._held["store"] = found

    async def _keep_local(self) -> None:
        try:
            self._held["local"] = await self._in("local", self._collect_local)  # here: `vitals` goes over it
        except StoreError as error:
            self._notices.tell(f"KCOORD_LOCAL_MAX_SIZE is not kept: {error}", about="the bound of the local directory")

    def _is_turn(self) -> bool:
        assert self._store is not None
        try:
            return is_turn(self._store / "v1" / "collected", EVERY)
        except OSError as error:
            log.info("the store was not looked through: %s", error)
            return False

    def _collect(self) -> None:
        """Raises `StoreError`."""
        store = self._store
        assert store is not None
        _yield_to_others()
        if self._limits.any:
            keep = functools.partial(pinned_digests, store)
            self._tell("the store", collect(store, self._limits, pinned=keep, most=_MOST))
            return
        with suppress(OSError):
            Trash(store / "v1" / "trash").empty()  # what `kcoord gc` has put there
        if self._settings.metrics is not None:
            count(store)

    def _compact(self) -> None:
        store = self._store
        assert store is not None
        _yield_to_others()
        merges: dict[str, Callable[[], int]] = {
            "parts of profiles": lambda: compact(store, self._trust, _MOST),
            "lists of needs": lambda: compact_needs(store, _MOST),
        }
        for what, merge in merges.items():
            try:
                merged = merge()
            except StoreError as error:  # what there is can be read as it is
                log.info("old %s were not merged: %s", what, error)
                continue
            if merged:
                log.info("%d old %s were merged", merged, what)

    def _collect_local(self) -> Holdings:
        """Raises `StoreError`."""
        _yield_to_others()
        places = {need.place for need in pinned_needs(self._store)} if self._store is not None else set()
        limits = Limits(max_size=self._settings.local_max_size)
        found = collect_local(self._settings.local_dir, limits, pinned=places, most=_MOST)
        self._tell("the local directory", found)
        return Holdings(*found.left, time.time())

    def _tell(self, where: str, found: Collected) -> None:
        if found.refused:
            self._notices.tell(
                f"{where}: its bound is not kept: of what was to go, {found.refused:,} may not be removed by this user: "
                "let all who use it be of one group, with umask 002", about=f"removing from {where}",
            )  # fmt: skip
        if found.removed:
            size = bytes_text(found.removed_size)
            log.info("%s: %d artifacts (%s) that were used longest ago were removed", where, len(found.removed), size)

    async def _in(self, which: str, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._io[which], work)


def _yield_to_others() -> None:
    """On Linux a thread has a priority of its own."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _about(seconds: float) -> float:
    return seconds * random.uniform(0.8, 1.2)
