"""What the flights decided, carried out: leases, the local tier and the store.

Disk work runs in threads, the store's apart from the local tier's, so that a stalled NFS server delays neither local
publishing nor a heartbeat.
"""

from __future__ import annotations

import asyncio
import functools
import platform
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from kcoord.agent import actions as act
from kcoord.agent.flights import Flights
from kcoord.agent.hedges import Hedges
from kcoord.agent.held_leases import HeldLeases
from kcoord.agent.store_access import SharedStore
from kcoord.artifacts import local
from kcoord.artifacts.manifest import Origin
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, LeaseUnavailable, StoreError
from kcoord.keys.cache_key import CacheKey
from kcoord.leases.base import Failed, LeaseService, Ready, Wait, Won, await_turn
from kcoord.protocol.fields import (
    label,
)
from kcoord.telemetry.events import Notices, log, tell_if_failed

T = TypeVar("T")

_MOST_FOREIGN = 100_000
_BUSY_FOR = 2.0  # seconds in which a key that another node compiles is not asked after again by claims that do not wait


class Errands:
    """Runs the actions of one agent's flights, each as a task; `report` gets the actions that follow from a result.

    ``learn(name, seconds)`` is told how long what is fetched took to compile.
    """

    def __init__(
        self,
        leases: LeaseService,
        store: Store | None,
        flights: Flights,
        notices: Notices,
        *,
        agent_id: str,
        ttl: float,
        now: Callable[[], float],
        report: Callable[[list[act.Action]], None],
        learn: Callable[[str, float], None] = lambda name, seconds: None,
    ) -> None:
        self._leases, self._flights, self._notices = leases, flights, notices
        self._store = SharedStore(store, notices)
        self._now, self._report, self._learn = now, report, learn
        self._held = HeldLeases(leases, notices, agent_id, ttl)
        self._local_io = ThreadPoolExecutor(4, "local-tier")
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._announcing: dict[str, asyncio.Task[None]] = {}
        self._hedges = Hedges(
            leases, self._held, flights, now, report,
            run=self._run, fetch=self._from_store, announcing=self._announcing.get,
        )  # fmt: skip
        self._foreign: set[str] = set()  # keys whose artifact in the store is for others to judge
        self._refused: set[int] = set()  # flights whose lease another node has: their end gives nothing back

    def start(self, action: act.LeaseTask) -> None:
        """Begin `action`; whatever comes of it goes to `report`."""
        serial = action.serial
        if isinstance(action, act.AskLease):
            self._asking[serial] = self._run(serial, self._ask(action))
        elif isinstance(action, act.Look):
            self._run(serial, self._look(action))
        elif isinstance(action, act.Fetch):
            self._run(serial, self._fetch(action))
        elif isinstance(action, act.EndLease):
            self._run(serial, self._end(action))
        elif isinstance(action, act.FailLease):
            self._run(serial, self._fail(action))
        elif isinstance(action, act.AskHedge):
            self._run(serial, self._hedges.ask(action))
        elif isinstance(action, act.EndHedge):
            self._run(serial, self._hedges.end(action))
        else:
            announcing = self._run(serial, self._announce(action))
            self._announcing[action.key] = announcing
            announcing.add_done_callback(functools.partial(self._announced, action.key))

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    @property
    def held(self) -> int:
        """How many leases this agent keeps alive."""
        return len(self._held)

    @property
    def store_is_faulty(self) -> bool:
        """Whether what is compiled here does not get into the store now, as far as that is known."""
        return self._store.faulty

    async def drain(self, timeout: float, giving_back: float = 5.0) -> None:
        """Let publishes finish, within `timeout` seconds, and stop waiting for others; then give back what is held, within
        `giving_back` seconds.
        """
        self._hedges.stop()
        for task in self._asking.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        back = asyncio.create_task(self._give_back())
        _, late = await asyncio.wait({back}, timeout=giving_back)
        if late:
            back.cancel()
            log.info("leases were not given back within %g s: they end by their TTL", giving_back)
        self._local_io.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    async def _give_back(self) -> None:
        held = set(self._held.all())  # a publish that is cancelled ends its renewal, and says nothing of its lease
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        asked_for = [*self._hedges.asked_for(), *((flight.key, flight.serial) for flight in self._flights)]
        ours = {*held, *self._held.all(), *asked_for}
        await asyncio.gather(*(self._held.give_back(key, serial) for key, serial in ours))

    async def publish_locally(
        self, staging: Path, home: Path, key: CacheKey, compile_seconds: float, origin: Origin
    ) -> local.Artifact:
        """Raises `ArtifactInvalid` or `StoreError`."""
        return await self._in(self._local_io, lambda: local.publish_local(staging, home, key, compile_seconds, origin))

    async def bring_home(self, digest: str, there: Path, home: Path) -> bool | None:
        """Copy an artifact of the local tier to another home of it. False: it cannot be had there. None: it is gone."""

        def copy() -> bool | None:
            try:
                if local.is_whole(home, digest):
                    return True
                found = local.read_artifact(there, digest)
                if found is None:
                    return None
                local.install(found[0].manifest, found[1], home)
            except ArtifactInvalid as error:
                self._notices.tell(str(error))
                return False
            except StoreError as error:
                self._notices.tell(str(error), about=f"the local directory: {error.remedy}")
                return False
            return True

        return await self._in(self._local_io, copy)

    async def in_store(self, work: Callable[[Store], T], patience: float) -> T | None:
        """What ``work(store)`` returns; None without a store, or if it fails, or has not answered for `patience` seconds, now or
        lately, which is told. Whoever is in no such hurry goes on using the store.

        Raises what else than `StoreError` `work` raises. Not guaranteed: that `work` ends when this does; its thread goes on.
        """
        return await self._store.use(work, patience)

    async def locally(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises, run beside the local tier's other disk work."""
        return await self._in(self._local_io, work)

    def _run(self, serial: int, errand: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(errand)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._done, serial))
        return task

    def _done(self, serial: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if tell_if_failed(task, "an errand failed", self._notices.tell):
            self._report(self._flights.derailed(serial))

    def _announced(self, key: str, task: asyncio.Task[None]) -> None:
        if self._announcing.get(key) is task:
            del self._announcing[key]

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def _ask(self, action: act.AskLease) -> None:
        key, serial = action.key, action.serial
        answer: Won | Ready | Failed | None
        try:
            # what READY says may well be true for others
            if action.void is not None and (self._store.faulty or key in self._foreign):
                answer = Won(0, coordinated=False)
            else:
                answer = await await_turn(
                    self._leases, key, self._held.token(serial), platform.node(), void=action.void,
                    on_wait=lambda wait: self._waits(key, serial, wait),
                    stays=lambda wait: self._stays(key, serial, wait),
                )  # fmt: skip
            if answer is None:
                return
            if isinstance(answer, Won) and answer.coordinated:
                answer = await self._keep_if_shared(answer, key, serial)
        except LeaseUnavailable as error:
            self._notices.tell(f"no lease service can be used ({error}): this node coordinates its own ranks only")
            answer = Won(0, coordinated=False)
        finally:
            self._asking.pop(serial, None)
        self._report(self._flights.lease_answered(key, serial, answer, self._now()))

    def _waits(self, key: str, serial: int, wait: Wait) -> None:
        until = self._now() + min(_BUSY_FOR, wait.ttl)
        self._report(self._flights.must_wait(key, serial, wait.holder, self._now(), until))

    def _stays(self, key: str, serial: int, wait: Wait) -> bool:
        """Whether anybody waits for the other node. If not, the flight has ended: no subscription, and no lease to release."""
        self._refused.add(serial)  # the flight's end begins after this
        self._waits(key, serial, wait)
        flight = self._flights.get(key)
        if flight is None or flight.serial != serial:
            return False
        self._refused.discard(serial)
        return True

    async def _keep_if_shared(self, won: Won, key: str, serial: int) -> Won:
        """Nobody is to wait for what does not get into the store: then the lease is given back, and this node compiles alone.

        That may be why another node that had it has nothing to show, so after a wait the store is looked at first.
        """
        await self._held.keep(key, serial)
        flight = self._flights.get(key)
        waited = flight is not None and flight.serial == serial and flight.waited
        if not self._store.faulty and not (waited and not await self._store.takes_artifacts()):
            return won
        await self._held.give_back(key, serial)
        return Won(won.fence, coordinated=False)

    async def _look(self, action: act.Look) -> None:
        home = Path(action.home)
        found, manifest = (
            await self._in(self._local_io, lambda: local.is_whole(home, action.key)),
            None,
        )
        if not found:
            manifest = await self._from_store(action.key, home, None)
        if manifest is None and action.key in self._foreign:  # what we compile stays here: nobody is to wait for it
            await self._held.give_back(action.key, action.serial)
        there = action.home if found or manifest else None
        self._report(self._flights.looked(action.key, action.serial, there, self._now(), manifest))

    async def _fetch(self, action: act.Fetch) -> None:
        home = Path(action.home)
        found = await self._in(self._local_io, lambda: local.is_whole(home, action.key))
        if not found:
            found = await self._from_store(action.key, home, action.manifest) is not None
        self._report(self._flights.fetched(action.key, action.serial, action.home if found else None))

    async def _from_store(self, digest: str, home: Path, announced: str | None) -> str | None:
        """Bring an artifact to `home`; return the SHA-256 of its manifest, None if it is not to be had."""
        try:
            fetched = await self._store.use(lambda store: store.fetch(digest, announced))
            if fetched is None:
                return None
            manifest, contents, stated = fetched
            self._learn(label(manifest.key.backend, manifest.key.name), manifest.compile_seconds)
            await self._in(self._local_io, lambda: local.install(manifest, contents, home))
        except ArtifactDistrusted as error:
            if error.unknown_key and len(self._foreign) < _MOST_FOREIGN:
                self._foreign.add(digest)
            self._notices.tell(f"{error}; kernels are compiled instead", about=f"trust: {error.fault}")
            return None
        except ArtifactInvalid as error:
            self._notices.tell(f"{error}; the kernel is compiled instead")
            return None
        except StoreError as error:
            self._notices.tell(f"{error}; kernels are compiled instead", about=f"the local directory: {error.remedy}")
            return None
        return stated

    async def _end(self, action: act.EndLease) -> None:
        asking = self._asking.pop(action.serial, None)
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if action.serial in self._refused:
            self._refused.discard(action.serial)
            await self._held.stop_renewing(action.key, action.serial)
        else:
            await self._held.give_back(action.key, action.serial)

    async def _fail(self, action: act.FailLease) -> None:
        await self._held.stop_renewing(action.key, action.serial)
        await self._held.quietly(
            self._leases.fail(action.key, self._held.token(action.serial), action.log, action.where)
        )

    async def _announce(self, action: act.Announce) -> None:
        """The lease is renewed until the store has the artifact, so that nobody compiles it meanwhile."""
        key, serial, home = action.key, action.serial, Path(action.home)
        asking = self._asking.pop(serial, None)
        if asking is not None:
            asking.cancel()
        try:
            manifest = action.manifest or await self._into_store(key, home)
        finally:
            await self._held.stop_renewing(key, serial)
        if manifest is None:
            await self._held.quietly(self._leases.release(key, self._held.token(serial)))
        else:
            await self._held.quietly(self._leases.ready(key, self._held.token(serial), manifest))

    async def _into_store(self, digest: str, home: Path) -> str | None:
        """Publish what is at `home`; return the SHA-256 of the store's manifest, None if it did not get there."""

        def publish(store: Store) -> str | None:
            found = local.read_artifact(home, digest)
            return None if found is None else store.publish(found[0].manifest, found[1])

        try:
            return await self._store.use(publish, publishes=True)  # published late is published: its thread goes on
        except ArtifactDistrusted as error:
            self._notices.tell(f"{error}; kernels stay on this node", about=f"not published: {error.fault}")
        except ArtifactInvalid as error:
            self._notices.tell(f"not published: {error}")
        return None
