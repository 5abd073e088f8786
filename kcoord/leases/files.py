"""Leases as files in the store: for several nodes without Redis, and for the time in which Redis is away.

``<store>/v1/leases/<ab>/`` holds ``<digest>.lease`` while a key is leased, and ``<digest>.outcome`` once it is READY or FAILED;
`lease_files` knows them. Nothing wakes a waiter of another node: it looks, ever more seldom. It hears of a change after at most a
quarter of the time that it has waited, and at most 2 s, and takes over from a holder that vanished when its TTL has run out.

What is not guaranteed: that there is one leader. A holder that was stopped for longer than its TTL, a marker that had to be put
back, a mount without close-to-open consistency (``nocto``) give two, which costs time only. A READY outcome stays, a hundred
bytes, until `kcoord gc` removes it; a FAILED one goes when it has expired and somebody asks. A process that is killed may leave a
``.part`` in the staging directory or beside a marker, which agents sweep. A marker that a fault of the file system keeps from
being removed stays, untouched: its key waits for its TTL, here as elsewhere, and whoever asks then moves it aside.
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
from kcoord.leases import file_threads
from kcoord.leases.base import Answer, Failed, LeaseService, Ready, Wait, Watch, Won, monotonic, within
from kcoord.leases.file_threads import FileThreads
from kcoord.leases.lease_files import KeyFiles, NotALease, probe

T = TypeVar("T")

_REMEMBERED = 10_000
_KEPT = 1000  # keys that nobody watches, and of which it is known since when their marker has not changed
_SOONEST, _LATEST = 0.05, 2.0  # seconds between two looks of a watch
_REFUSED_FOR = 60.0  # seconds in which lease files are not tried again after nodes turned out to differ in their TTL
_FILE_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,99}")


@dataclass
class _Lease:
    token: str
    holder: str
    fence: int
    limit: float
    expires: float


@dataclass
class _Key:
    """What this process knows of one key. `lock` is held while a thread is at its files."""

    name: str
    files: KeyFiles
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    lease: _Lease | None = None
    timer: asyncio.TimerHandle | None = None
    users: int = 0
    events: set[asyncio.Event] = field(default_factory=set)

    def wake(self) -> None:
        for event in self.events:
            event.set()


@dataclass(frozen=True)
class _Claim:
    """A token that had a lease: it may take it again, up to `limit`."""

    holder: str
    limit: float


_ENDED = _Claim("", 0.0)
"""The lease was given up, and its limit is over: a renewal that comes late does not take it again."""


@dataclass
class _Request:
    """`abandoned`: nobody waits for its answer any more."""

    abandoned: bool = False


Work = Callable[[_Key, _Request], Coroutine[Any, Any, T]]


class FileLeases(LeaseService):
    """Lease files of one agent, in the store at `store`. Times in seconds; all nodes must have the same `ttl`.

    A lease is given back by this process when it was not renewed for `ttl`, or at its limit. If this process is stopped, killed
    or cut off, others take it when its marker was untouched for `ttl`; a killed one's on the same host at once (not on NFS).

    The fence grows with every lease that *this process* wins, and says nothing about other nodes': no file system orders them.
    """

    name = "lease files"

    def __init__(self, store: Path, *, ttl: float, limit: float, failure_ttl: float) -> None:
        self._root, self._staging = store / "v1" / "leases", store / "v1" / "staging"
        self._ttl, self._limit, self._failure_ttl = ttl, limit, failure_ttl
        self._keys: OrderedDict[str, _Key] = OrderedDict()  # those in use, and some that were asked for lately
        self._claims: OrderedDict[tuple[str, str], _Claim] = OrderedDict()  # the oldest are forgotten first
        self._fences = itertools.count(1)
        self._threads = FileThreads(self._root)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refused = (0.0, "")  # until when, and why
        self._closed = False

    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        async def work(known: _Key, request: _Request) -> Answer:
            if known.lease is not None:
                standing = await self._standing(known, void)
                if not isinstance(standing, bool):
                    return standing
                lease = known.lease
                if lease is not None and lease.token == token:
                    return Won(lease.fence)
                if lease is not None:
                    return Wait(lease.holder, max(0.0, lease.expires - monotonic()))
            return await self._attempt(known, request, token, _Claim(holder, monotonic() + self._limit), void)

        return await self._command(key, work)

    async def renew(self, key: str, token: str) -> bool:
        async def work(known: _Key, request: _Request) -> bool:
            claim = self._claims.get((key, token))
            if claim is None:  # leased while another service stood in for this one
                claim = _Claim(token, monotonic() + self._limit)
            ours = known.lease is not None and known.lease.token == token
            if monotonic() >= claim.limit:
                if ours:
                    await self._end(known)
                return False
            if known.lease is not None:
                standing = await self._standing(known, None)
                if not isinstance(standing, bool):
                    return False
                if known.lease is not None:
                    if ours:
                        self._prolong(known, known.lease)
                    return ours
            answer = await self._attempt(known, request, token, claim, None)
            return isinstance(answer, Won) and answer.coordinated

        return await self._command(key, work)

    async def ready(self, key: str, token: str, manifest: str) -> None:
        self._remember(key, token, _ENDED)

        async def work(known: _Key, request: _Request) -> None:
            try:
                await self._threads.run(lambda: known.files.announce(Ready(manifest)))
            finally:
                await self._end(known)

        await self._command(key, work)

    async def fail(self, key: str, token: str, log: str, where: str) -> bool:
        self._remember(key, token, _ENDED)

        async def work(known: _Key, request: _Request) -> bool:
            if known.lease is None or known.lease.token != token or await self._standing(known, None) is not True:
                return False
            try:
                await self._threads.run(lambda: known.files.announce(Failed(log, where)))
            finally:
                await self._end(known)
            return True

        return await self._command(key, work)

    async def release(self, key: str, token: str) -> bool:
        self._remember(key, token, _ENDED)
        if key not in self._keys:
            return False

        async def work(known: _Key, request: _Request) -> bool:
            if known.lease is None or known.lease.token != token:
                return False
            await self._end(known)
            return True

        return await self._command(key, work)

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
        """Give back what is held, within a bound; what is not given back then, others take after its TTL."""
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

    # What a command does, with the key's lock held.

    async def _standing(self, known: _Key, void: str | None) -> Ready | Failed | bool:
        """How this process's lease stands. One that has ended, whatever ended it, is given back."""
        lease = known.lease
        standing: Ready | Failed | bool = False
        if lease is not None and monotonic() < lease.expires:
            standing = await self._threads.run(lambda: known.files.standing(void))
        if standing is not True:
            await self._end(known)
        return standing

    async def _attempt(self, known: _Key, request: _Request, token: str, claim: _Claim, void: str | None) -> Answer:
        def attempt() -> Ready | Failed | Wait | None:
            found = known.files.attempt(void)
            if found is None and self._closed:
                known.files.release()
            return found

        try:
            found = await self._threads.run(attempt)
        except NotALease:
            return Won(next(self._fences), coordinated=False)
        except LeaseUnavailable as error:
            self._refused = monotonic() + _REFUSED_FOR, str(error)
            raise
        if found is not None:
            return found
        now = monotonic()
        known.lease = _Lease(token, claim.holder, next(self._fences), claim.limit, now)
        self._prolong(known, known.lease)
        if request.abandoned:  # it came back too late from a file system that hung: nobody knows that it was won
            await self._end(known)
        else:
            self._remember(known.name, token, claim)
        return Won(known.lease.fence if known.lease is not None else 0)

    def _prolong(self, known: _Key, lease: _Lease) -> None:
        """The heartbeat is a thread of filelock's, and would go on for ever: a lease that is not renewed ends by this timer."""
        lease.expires = min(monotonic() + self._ttl, lease.limit)
        if known.timer is not None:
            known.timer.cancel()
        loop = asyncio.get_running_loop()
        known.timer = loop.call_later(max(0.0, lease.expires - monotonic()), self._expire, known)

    def _expire(self, known: _Key) -> None:
        async def work(known: _Key, request: _Request) -> None:
            if known.lease is not None and monotonic() >= known.lease.expires:
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

    def _remember(self, key: str, token: str, claim: _Claim) -> None:
        self._claims[key, token] = claim
        self._claims.move_to_end((key, token))
        if len(self._claims) > _REMEMBERED:
            self._claims.popitem(last=False)

    # How a command is run: bounded, and one after the other for each key.

    async def _command(self, key: str, work: Work[T]) -> T:
        """Raises `LeaseUnavailable`. If nobody waits for it any more, its work goes on, and knows."""
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
        """Run `work` whether or not its caller is cancelled; whoever awaits it sees its error."""
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
        """Forget the keys that were asked for longest ago; one that is leased, watched or asked for now stays."""
        if len(self._keys) > _KEPT:
            idle = [k for k, known in self._keys.items() if not (known.lease or known.users or known.events)]
            for key in idle[: len(self._keys) - _KEPT]:
                del self._keys[key]


class _Watch(Watch):
    """Looks at a key's files, and hears at once what this process does."""

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
            try:
                await within(max(0.0, min(pause, left)), self._event.wait())
            except asyncio.TimeoutError:
                if pause >= left:
                    return False
                if await self._looked_different():
                    return True
            else:
                self._event.clear()
                return True

    async def _looked_different(self) -> bool:
        known = self._known
        if known is None:
            return False
        try:
            state = await self._leases._look(known)
        except LeaseUnavailable:
            return True  # whoever asks now is told
        before, self._state = self._state, state
        return state != before
