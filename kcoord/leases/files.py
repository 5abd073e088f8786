"""Leases as files in the store: for several nodes without Redis, and while Redis is away.

``<store>/v2/leases/<ab>/`` holds ``<digest>.lease``, the marker, while a key is leased, and ``<digest>.outcome`` once it is READY
or FAILED; `lease_files` reads and writes them. Nothing wakes a waiter of another node: it polls, ever more seldom. It learns of
a change after at most a quarter of the time that it has waited, and at most 2 s, and follows a vanished holder after its TTL.

Not guaranteed: that there is one leader. A holder that was stopped for longer than its TTL, a marker that had to be put back, or
a mount without close-to-open consistency (``nocto``) give two, which costs time only. A READY outcome stays, a hundred bytes,
until `kcoord gc` removes it; a FAILED one is removed by the first claim after its time. A killed process may leave a ``.part`` in
the staging directory or beside a marker, which agents sweep. A marker that a fault of the file system keeps from being removed
stays untouched: its key waits for its TTL, on every node, and the next claim moves it aside.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kcoord.errors import LeaseUnavailable
from kcoord.files.atomic import LAYOUT
from kcoord.leases import file_threads
from kcoord.leases.base import Failed, Lease, LeaseService, Ready, Wait, Watch, Won, happened, monotonic
from kcoord.leases.file_threads import FileThreads
from kcoord.leases.lease_files import KeyFiles, NotALease, probe

T = TypeVar("T")

_KEPT = 1000  # keys without lease or watch whose markers' ages are remembered
_SOONEST, _LATEST = 0.05, 2.0  # seconds between two looks of a watch
_REFUSED_FOR = 60.0  # seconds without lease files after nodes turned out to differ in their TTL
_FILE_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,99}")


@dataclass
class _Key:
    """One key as this process knows it. `lock` is held while a thread is at its files."""

    name: str
    files: KeyFiles
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease: Lease | None = None
    fence: int = 0
    expires: float = 0.0
    timer: asyncio.TimerHandle | None = None
    users: int = 0
    events: set[asyncio.Event] = field(default_factory=set)

    def is_leased_by(self, lease: Lease) -> bool:
        return self.lease is not None and self.lease.token == lease.token

    def wake(self) -> None:
        for event in self.events:
            event.set()


@dataclass
class _Request:
    """`abandoned`: nobody waits for its answer any more."""

    abandoned: bool = False


Work = Callable[[_Key, _Request], Coroutine[Any, Any, T]]


class FileLeases(LeaseService):
    """Lease files of one agent, in the store at `store`. Times in seconds; all nodes must have the same `ttl`.

    This process gives a lease back when it was not renewed for `ttl`, or at its limit. If this process is stopped, killed or cut
    off, others take it after its marker was untouched for `ttl`; that of a process killed on the same host at once (not on NFS).

    The fence grows with every lease that *this process* wins, and says nothing about other nodes': no file system orders them.
    """

    name = "lease files"

    def __init__(self, store: Path, *, ttl: float, limit: float, failure_ttl: float) -> None:
        super().__init__(limit)
        self._root, self._staging = store / LAYOUT / "leases", store / LAYOUT / "staging"
        self._ttl, self._failure_ttl = ttl, failure_ttl
        self._keys: OrderedDict[str, _Key] = OrderedDict()  # those in use, and some that were used lately
        self._fences = itertools.count(1)
        self._threads = FileThreads(self._root)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refused = (0.0, "")  # until when, and why
        self._closed = False

    async def take(self, lease: Lease, void: str | None) -> Won | Ready | Failed | Wait:
        async def work(known: _Key, request: _Request) -> Won | Ready | Failed | Wait:
            answer = await self._answer(known, void)
            if answer is None:
                return await self._attempt(known, request, lease, void)
            return Won(known.fence) if isinstance(answer, Wait) and known.is_leased_by(lease) else answer

        return await self._command(lease.key, work)

    async def look(self, key: str) -> Ready | Failed | Wait | None:
        async def work(known: _Key, request: _Request) -> Ready | Failed | Wait | None:
            return await self._answer(known, None) or await self._threads.run(known.files.look)

        return await self._command(key, work)

    async def renew(self, lease: Lease) -> bool:
        async def work(known: _Key, request: _Request) -> bool:
            ours = known.is_leased_by(lease)
            if lease.left() <= 0:
                if ours:
                    await self._end(known)
                return False
            answer: object = await self._answer(known, None)
            if answer is None:
                answer = await self._attempt(known, request, lease, None)
                return isinstance(answer, Won) and answer.fence > 0
            if ours and isinstance(answer, Wait):
                self._prolong(known)
            return ours and isinstance(answer, Wait)

        return await self._command(lease.key, work)

    async def ready(self, key: str, manifest: str, lease: Lease | None = None) -> None:
        async def work(known: _Key, request: _Request) -> None:
            await self._announce(known, Ready(manifest))

        await self._command(key, work)

    async def fail(self, lease: Lease, log: str, where: str) -> bool:
        async def work(known: _Key, request: _Request) -> bool:
            if not known.is_leased_by(lease) or not isinstance(await self._answer(known, None), Wait):
                return False
            await self._announce(known, Failed(log, where))
            return True

        return await self._command(lease.key, work)

    async def release(self, lease: Lease) -> bool:
        if lease.key not in self._keys:
            return False

        async def work(known: _Key, request: _Request) -> bool:
            ours = known.is_leased_by(lease)
            if ours:
                await self._end(known)
            return ours

        return await self._command(lease.key, work)

    def watch(self, key: str) -> Watch:
        return _Watch(self, key)

    async def ping(self) -> None:
        """Return if files can be made and renamed to where leases are. Raises `LeaseUnavailable`."""
        until, why = self._refused
        if monotonic() < until:
            raise LeaseUnavailable(why)

        self._threads.check()
        await self._threads.bounded(self._threads.run(lambda: probe(self._root, self._staging)))

    async def close(self) -> None:
        """Give the leases back, within a bound; others take the rest after its TTL."""
        self._closed = True
        for known in self._keys.values():
            self._later(self._locked(known, self._given_back, _Request()))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=file_threads.COMMAND_TIMEOUT)
        for task in self._tasks:
            task.cancel()
        self._threads.close()

    async def _given_back(self, known: _Key, request: _Request) -> None:
        await self._end(known)

    # The steps of a command, which has the key's lock.

    async def _answer(self, known: _Key, void: str | None) -> Ready | Failed | Wait | None:
        """The answer if this process leases the key. None: it does not; one that has ended, however it did, is given back."""
        lease, answer = known.lease, None
        if lease is None:
            return None
        if monotonic() < known.expires:
            standing = await self._threads.run(lambda: known.files.standing(void))
            if standing is True:
                return Wait(lease.holder, max(0.0, known.expires - monotonic()))
            answer = standing or None
        await self._end(known)
        return answer

    async def _attempt(
        self, known: _Key, request: _Request, lease: Lease, void: str | None
    ) -> Won | Ready | Failed | Wait:
        def attempt() -> Ready | Failed | Wait | None:
            found = known.files.attempt(void)
            if found is None and self._closed:
                known.files.release()
            return found

        try:
            found = await self._threads.run(attempt)
        except NotALease:
            return Won(0)
        except LeaseUnavailable as error:
            self._refused = monotonic() + _REFUSED_FOR, str(error)
            raise
        if found is not None:
            return found
        known.lease, known.fence = lease, next(self._fences)
        self._prolong(known)
        if request.abandoned:  # it came back too late from a file system that hung: nobody knows that it was won
            await self._end(known)
        return Won(known.fence)

    async def _announce(self, known: _Key, outcome: Ready | Failed) -> None:
        try:
            await self._threads.run(lambda: known.files.announce(outcome))
        finally:
            await self._end(known)

    def _prolong(self, known: _Key) -> None:
        """Another TTL. filelock's heartbeat, a thread, never stops by itself: this timer ends a lease that is not renewed."""
        lasts = min(self._ttl, known.lease.left() if known.lease is not None else 0.0)
        known.expires = monotonic() + lasts
        if known.timer is not None:
            known.timer.cancel()
        known.timer = asyncio.get_running_loop().call_later(lasts, self._expire, known)

    def _expire(self, known: _Key) -> None:
        async def work(known: _Key, request: _Request) -> None:
            if known.lease is not None and monotonic() >= known.expires:
                await self._end(known)

        self._later(self._locked(known, work, _Request()))

    async def _end(self, known: _Key) -> None:
        """Forget the lease and its marker, if there is one, and wake this process's waiters."""
        if known.timer is not None:
            known.timer.cancel()
            known.timer = None
        try:
            if known.lease is not None:
                known.lease = None
                await self._threads.run(known.files.release)
        finally:
            known.wake()

    # Commands run bounded, and one after the other for each key.

    async def _command(self, key: str, work: Work[T]) -> T:
        """Run `work`. Raises `LeaseUnavailable`. If its caller is cancelled the work goes on, its request abandoned."""
        if self._closed:
            raise LeaseUnavailable("this agent is ending")
        self._threads.check()
        request = _Request()
        task = self._later(self._locked(self._key(key), work, request))
        try:
            return await self._threads.bounded(asyncio.shield(task))
        except BaseException:
            request.abandoned = True
            raise

    async def _locked(self, known: _Key, work: Work[T], request: _Request) -> T:
        known.users += 1
        try:
            async with known.lock:
                if request.abandoned:
                    raise LeaseUnavailable("nobody waits for this any more")
                return await work(known, request)
        finally:
            known.users -= 1
            self._tidy()

    async def _look(self, known: _Key) -> object:
        self._threads.check()
        return await self._threads.bounded(self._threads.run(known.files.changes))

    def _later(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work`, also if its caller is cancelled; awaiting it raises its error."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        return task

    def _key(self, key: str) -> _Key:
        known = self._keys.get(key)
        if known is None:
            name = key if _FILE_NAME.fullmatch(key) else hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()
            files = KeyFiles(self._root / name[:2], self._staging, name, self._ttl, self._failure_ttl)
            known = self._keys[key] = _Key(key, files)
        self._keys.move_to_end(key)
        return known

    def _tidy(self) -> None:
        """Forget the keys that were used longest ago, without those that are leased, watched or used now."""
        if len(self._keys) > _KEPT:
            idle = [k for k, known in self._keys.items() if not (known.lease or known.users or known.events)]
            for key in idle[: len(self._keys) - _KEPT]:
                del self._keys[key]


class _Watch(Watch):
    """Polls a key's files; what this process does wakes it at once."""

    def __init__(self, leases: FileLeases, key: str) -> None:
        self._leases, self._key, self._event = leases, key, asyncio.Event()
        self._state: object = None
        self._known: _Key | None = None
        self._since = 0.0

    async def __aenter__(self) -> _Watch:
        known = self._leases._key(self._key)
        known.events.add(self._event)
        try:
            self._state = await self._leases._look(known)
        except BaseException:
            known.events.discard(self._event)
            raise
        self._known, self._since = known, monotonic()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._known is not None:
            self._known.events.discard(self._event)
            self._leases._tidy()

    async def changed(self, timeout: float) -> bool:
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
        known = self._known
        if known is None:
            return False
        try:
            state = await self._leases._look(known)
        except LeaseUnavailable:
            return True  # the next command raises it
        before, self._state = self._state, state
        return state != before
