"""Leases as files in the store: for several nodes without Redis, and while Redis is away.

``<store>/v2/leases/<ab>/`` holds ``<digest>.lease``, the marker, while a key is leased, and ``<digest>.outcome`` once it is READY
or FAILED; `lease_files` reads and writes them. Nothing wakes a waiter of another node: it polls, ever more seldom. It learns of
a change after at most a quarter of the time that it has waited, and at most 2 s, and follows a vanished holder after its TTL.

Not guaranteed: that there is one leader. A holder that was stopped for longer than its TTL, a marker that cannot be put back, or
a mount without close-to-open consistency (``nocto``) give two, which costs time only. A READY outcome stays, a hundred bytes,
until `kcoord gc` removes it; a FAILED one is removed by the first claim after its time. A killed process may leave a ``.part`` in
the staging directory or beside a marker, which agents sweep. A marker that a fault of the file system keeps from being removed
stays untouched: its key waits for its TTL, on every node, and the next claim moves it aside.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kcoord.errors import LeaseUnavailable
from kcoord.files.atomic import LAYOUT
from kcoord.files.faults import store_error
from kcoord.leases.base import (
    Answer,
    Failed,
    Lease,
    LeaseService,
    Ready,
    Unleased,
    Wait,
    Watch,
    happened,
    monotonic,
    within,
)
from kcoord.leases.lease_files import KeyFiles, NotALease

T = TypeVar("T")

_THREADS, _MOST_STUCK = 8, 4
_KEPT = 1000  # keys without lease or watch whose markers' ages are remembered
_SOONEST, _LATEST = 0.05, 2.0  # seconds between two looks of a watch
_FILE_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,99}")


@dataclass
class _Key:
    """One key as this process knows it. `lock` is held while a thread is at its files."""

    files: KeyFiles
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease: Lease | None = None
    expires: float = 0.0
    timer: asyncio.TimerHandle | None = None
    users: int = 0
    events: set[asyncio.Event] = field(default_factory=set)

    def is_leased_by(self, lease: Lease) -> bool:
        return self.lease is not None and self.lease.token == lease.token


class FileLeases(LeaseService):
    """Lease files of one agent, in the store at `store`. Times in seconds.

    A command ends within `patience`. Its thread may hang for longer; while too many do, all commands are refused.

    This process gives a lease back when it was not renewed for `ttl`, or at its limit. If this process is stopped, killed or cut
    off, others take it after its marker was untouched for `ttl`; that of a process killed on the same host at once (not on NFS).
    """

    name = "lease files"

    def __init__(self, store: Path, *, ttl: float, limit: float, failure_ttl: float, patience: float = 4.0) -> None:
        self._root, self._staging = store / LAYOUT / "leases", store / LAYOUT / "staging"
        self._ttl, self._limit, self._failure_ttl, self._patience = ttl, limit, failure_ttl, patience
        self._keys: OrderedDict[str, _Key] = OrderedDict()  # those in use, and some that were used lately
        self._pool = ThreadPoolExecutor(_THREADS, "lease-files")
        self._busy: dict[int, float] = {}  # thread → since when it is at a file
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = self._answered = False

    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        self._check()
        known, lease = self._key(key), Lease(self, key, token, holder, self._limit)
        try:
            return await self._command(known, self._acquire(known, lease, void))
        except BaseException:
            self._later(known, self._unheard(known, lease))  # if it is won all the same, nobody knows
            raise

    async def renew(self, lease: Lease) -> bool:
        return await self._command(known := self._key(lease.key), self._renew(known, lease))

    async def ready(self, key: str, manifest: str) -> None:
        await self._command(known := self._key(key), self._announce(known, Ready(manifest)))

    async def fail(self, lease: Lease, log: str, where: str) -> bool:
        return await self._command(known := self._key(lease.key), self._fail(known, lease, Failed(log, where)))

    async def release(self, lease: Lease) -> bool:
        known = self._keys.get(lease.key)
        return known is not None and await self._command(known, self._release(known, lease))

    def watch(self, key: str) -> Watch:
        return _Watch(self, key)

    async def close(self) -> None:
        """Give the leases back, within a bound; others take the rest after its TTL."""
        self._closed = True
        for known in self._keys.values():
            self._later(known, self._end(known))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._patience)
        for task in self._tasks:
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # The commands, one after the other for each key.

    async def _acquire(self, known: _Key, lease: Lease, void: str | None) -> Answer:
        standing = await self._standing(known, void)
        if isinstance(standing, Wait) and known.lease is not None and known.is_leased_by(lease):
            return known.lease
        return standing or await self._attempt(known, lease, void)

    async def _renew(self, known: _Key, lease: Lease) -> bool:
        if lease.left() <= 0:
            await self._release(known, lease)
            return False
        ours, standing = known.is_leased_by(lease), await self._standing(known, None)
        if standing is None:
            return isinstance(await self._attempt(known, lease, None), Lease)
        if ours and isinstance(standing, Wait):
            self._prolong(known)
        return ours and isinstance(standing, Wait)

    async def _fail(self, known: _Key, lease: Lease, failure: Failed) -> bool:
        if not known.is_leased_by(lease) or not isinstance(await self._standing(known, None), Wait):
            return False
        await self._announce(known, failure)
        return True

    async def _release(self, known: _Key, lease: Lease) -> bool:
        if ours := known.is_leased_by(lease):
            await self._end(known)
        return ours

    async def _unheard(self, known: _Key, lease: Lease) -> None:
        if known.lease is lease:
            await self._end(known)

    async def _announce(self, known: _Key, outcome: Ready | Failed) -> None:
        try:
            await self._run(lambda: known.files.announce(outcome))
        finally:
            await self._end(known)

    async def _standing(self, known: _Key, void: str | None) -> Ready | Failed | Wait | None:
        """The answer if this process leases the key. None: it does not; one that has ended, however it did, is given back."""
        lease, answer = known.lease, None
        if lease is None:
            return None
        if monotonic() < known.expires:
            standing = await self._run(lambda: known.files.standing(void))
            if standing is True:
                return Wait(lease.holder, max(0.0, known.expires - monotonic()))
            answer = standing or None
        await self._end(known)
        return answer

    async def _attempt(self, known: _Key, lease: Lease, void: str | None) -> Answer:
        def attempt() -> Ready | Failed | Wait | None:
            found = known.files.attempt(void)
            if found is None and self._closed:
                known.files.release()
            return found

        try:
            found = await self._run(attempt)
        except NotALease:
            return Unleased()
        if found is not None:
            return found
        known.lease = lease
        self._prolong(known)
        return lease

    def _prolong(self, known: _Key) -> None:
        """Another TTL. filelock's heartbeat, a thread, never stops by itself: this timer ends a lease that is not renewed."""
        lasts = min(self._ttl, known.lease.left() if known.lease is not None else 0.0)
        known.expires = monotonic() + lasts
        if known.timer is not None:
            known.timer.cancel()
        known.timer = asyncio.get_running_loop().call_later(lasts, lambda: self._later(known, self._expire(known)))

    async def _expire(self, known: _Key) -> None:
        if known.lease is not None and monotonic() >= known.expires:
            await self._end(known)

    async def _end(self, known: _Key) -> None:
        """Forget the lease and its marker, if there is one, and wake this process's waiters."""
        if known.timer is not None:
            known.timer.cancel()
            known.timer = None
        try:
            if known.lease is not None:
                known.lease = None
                await self._run(known.files.release)
        finally:
            for event in known.events:
                event.set()

    # Bounds.

    async def _command(self, known: _Key, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, within a bound. It goes on after that, and if its caller is cancelled."""
        try:
            self._check()
        except LeaseUnavailable:
            work.close()
            raise
        return await self._bounded(asyncio.shield(self._later(known, work)))

    def _check(self) -> None:
        """Raises `LeaseUnavailable` while too many threads hang: then one more would hang as well."""
        if self._closed:
            raise LeaseUnavailable("this agent is ending")
        late = monotonic() - self._patience
        if sum(since < late for since in list(self._busy.values())) >= _MOST_STUCK:
            raise LeaseUnavailable(f"{self._root}: it has not answered for {self._patience:g} s: look at its server")

    async def _bounded(self, work: asyncio.Future[T]) -> T:
        """Raises `LeaseUnavailable`, which ends with the remedy, for an OSError and after `patience`."""
        try:
            done = await within(self._patience, work)
            self._answered = True
            return done
        except TimeoutError:
            raise LeaseUnavailable(f"{self._root}: no answer in {self._patience:g} s: look at its server") from None
        except OSError as error:
            # the agent tells that there is no store
            told = isinstance(error, FileNotFoundError) and not self._answered
            raise LeaseUnavailable(str(store_error(error, self._root)), told=told) from error

    def _later(self, known: _Key, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` with the key's lock, whether or not anybody waits; awaiting it raises its error."""

        async def locked() -> T:
            async with known.lock:
                return await work

        def done(task: asyncio.Task[T]) -> None:
            work.close()  # it may have been cancelled before it began
            known.users -= 1
            self._tasks.discard(task)
            self._tidy()
            if not task.cancelled():
                task.exception()  # seen, though nobody waits

        known.users += 1
        task = asyncio.create_task(locked())
        self._tasks.add(task)
        task.add_done_callback(done)
        return task

    async def _run(self, work: Callable[[], T]) -> T:
        """The result of `work`, in a thread that a dead file system may hold for ever."""

        def noted() -> T:
            self._busy[threading.get_ident()] = monotonic()
            try:
                return work()
            finally:
                del self._busy[threading.get_ident()]

        return await asyncio.get_running_loop().run_in_executor(self._pool, noted)

    async def _changes(self, known: _Key) -> object:
        self._check()
        return await self._bounded(asyncio.ensure_future(self._run(known.files.changes)))

    def _key(self, key: str) -> _Key:
        known = self._keys.get(key)
        if known is None:
            name = key if _FILE_NAME.fullmatch(key) else hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
            files = KeyFiles(self._root / name[:2], self._staging, name, self._ttl, self._failure_ttl)
            known = self._keys[key] = _Key(files)
        self._keys.move_to_end(key)
        return known

    def _tidy(self) -> None:
        """Forget the keys that were used longest ago, without those that are leased, watched or used now."""
        if len(self._keys) > _KEPT:
            idle = [k for k, known in self._keys.items() if not (known.lease or known.users or known.events)]
            for key in idle[: len(self._keys) - _KEPT]:
                del self._keys[key]


class _Watch(Watch):
    """Polls a key's files; what this process does wakes it at once. Entering it costs nothing: the first call of `changed` looks
    at the files, and says that the key may have changed since it was entered.
    """

    def __init__(self, leases: FileLeases, key: str) -> None:
        self._leases, self._known, self._event = leases, leases._key(key), asyncio.Event()
        self._since: float | None = None
        self._state: object = None

    async def __aenter__(self) -> _Watch:
        self._known.events.add(self._event)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._known.events.discard(self._event)
        self._leases._tidy()

    async def changed(self, timeout: float) -> bool:
        if self._since is None:
            self._state, self._since = await self._leases._changes(self._known), monotonic()
            return True
        deadline = monotonic() + timeout
        while True:
            pause = min(max(_SOONEST, (monotonic() - self._since) / 4), _LATEST) * random.uniform(0.8, 1.2)
            left = deadline - monotonic()
            if await happened(self._event, max(0.0, min(pause, left))):
                return True
            if pause >= left:
                return False
            if await self._looked_different():
                return True

    async def _looked_different(self) -> bool:
        try:
            state = await self._leases._changes(self._known)
        except LeaseUnavailable:
            return True  # the next command raises it
        before, self._state = self._state, state
        return state != before
