"""Carries out the actions of flights: the lease of a key, the right to hedge, and the artifact, which `tiers` brings."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from kcoord.agent import actions as act
from kcoord.agent.connections import Observer
from kcoord.agent.flights import Flights
from kcoord.agent.hedges import Hedges
from kcoord.agent.held_leases import HeldLeases
from kcoord.agent.tiers import Tiers
from kcoord.artifacts.store import Store
from kcoord.errors import LeaseUnavailable
from kcoord.latest import Latest
from kcoord.leases.base import Failed, Lease, LeaseService, Ready, Wait, Won
from kcoord.telemetry.events import Notices, log, tell_if_failed

T = TypeVar("T")

_MOST_DISTRUSTED = 100_000
_MOST_PASSING = 20_000
_BUSY_FOR = 2.0  # seconds in which claims that do not wait do not ask again for a key that another node compiles


class LeaseTasks:
    """Carries out the actions of one agent's flights, each as a task; `report` gets the actions that follow from a result.

    `learn`, `in_store`, `observer` and `local_dir` are those of `kcoord.agent.tiers.Tiers`.
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
        in_store: Callable[[str], object] = lambda digest: None,
        local_dir: Path | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._flights, self._notices, self._now, self._report = flights, notices, now, report
        self.tiers = Tiers(store, local_dir, notices, learn=learn, in_store=in_store, observer=observer)
        self._held = HeldLeases(leases, notices, agent_id, ttl)
        self._hedges = Hedges(self._held, flights)
        self._work: dict[type[act.LeaseTask], Callable[[Any], Coroutine[Any, Any, None]]] = {
            act.AskLease: self._ask,
            act.Look: self._look,
            act.Fetch: self._fetch,
            act.EndLease: self._end,
            act.FailLease: self._fail,
            act.Announce: self._announce,
            act.AskHedge: self._ask_hedge,
            act.EndHedge: self._end_hedge,
        }
        self.passing: Latest[str, None] = Latest(_MOST_PASSING)
        """Homes in directories that their ranks throw away. A lease for them would hold up other nodes, which get nothing."""
        self._ends = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: dict[int, asyncio.Task[None]] = {}  # by the flight's serial number
        self._following: dict[int, asyncio.Task[None]] = {}  # likewise
        self._announcing: dict[str, asyncio.Task[None]] = {}  # by key, the latest

    def start(self, action: act.LeaseTask) -> None:
        """Begin `action`; the actions that follow from its result go to `report`. After `drain` no lease is asked for."""
        if self._ends and isinstance(action, act.AskLease):
            return  # nobody would give the lease back
        task = self._run(action.serial, self._work[type(action)](action))
        if isinstance(action, act.AskLease):
            self._asking[action.serial] = task
        elif isinstance(action, act.Announce):
            self._announcing[action.key] = task
            task.add_done_callback(functools.partial(self._announced, action.key))

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    @property
    def uploads(self) -> int:
        """The number of artifacts that are on their way into the store."""
        return len(self._announcing)

    @property
    def held(self) -> int:
        """The number of leases that this agent keeps alive."""
        return len(self._held)

    async def uploaded(self, timeout: float) -> None:
        """Wait until the artifacts that are on their way are in the store, for `timeout` seconds at most."""
        if self._announcing:
            await asyncio.wait(set(self._announcing.values()), timeout=timeout)

    async def drain(self, timeout: float, giving_back: float = 5.0) -> None:
        """Stop waiting for other nodes, let publishes finish within `timeout` seconds, and give the leases back within
        `giving_back` seconds.
        """
        self._ends = True
        for task in (*self._asking.values(), *self._following.values()):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        back = asyncio.create_task(self._give_back())
        _, late = await asyncio.wait({back}, timeout=giving_back)
        if late:
            back.cancel()
            log.info("leases were not given back within %g s: they end by their TTL", giving_back)
        self.tiers.close()

    async def _give_back(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._held.give_all_back()

    def _run(self, serial: int, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
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

    # The lease of a flight's key.

    async def _ask(self, action: act.AskLease) -> None:
        key, serial = action.key, action.serial
        try:
            answer = await self._turn(action)
        except LeaseUnavailable as error:
            self._notices.tell(f"no lease service can be used ({error}): this node coordinates its own ranks only")
            answer = Won(0)
        finally:
            self._asking.pop(serial, None)
        if answer is not None:
            self._report(self._flights.lease_answered(key, serial, answer, self._now()))

    async def _turn(self, action: act.AskLease) -> Won | Ready | Failed | None:
        """None: another node compiles, and nobody waits for it. A fence of 0: the flight goes ahead without a lease."""
        key, serial = action.key, action.serial
        if action.void is None and (packed := await self.tiers.packs.announced(key)) is not None:
            return Ready(packed)
        flight = self._flights.get(key)
        if flight is not None and flight.waiters and all(w.home in self.passing for w in flight.waiters.values()):
            return Won(0)
        if action.void is not None and (self.tiers.store.faulty or self.tiers.distrusts(key)):
            return Won(0)  # that READY may well be true for others
        answer = await self._held.await_turn(
            key, serial, action.void, on_wait=functools.partial(self._must_wait, key, serial),
            stays=functools.partial(self._is_awaited, key, serial),
        )  # fmt: skip
        if not isinstance(answer, Lease):
            return answer
        if answer.fence and not await self._is_shared(key, serial):
            await self._held.give_back(key, serial)
            return Won(0)
        return Won(answer.fence)

    def _must_wait(self, key: str, serial: int, wait: Wait) -> None:
        until = self._now() + min(_BUSY_FOR, wait.ttl)
        self._report(self._flights.must_wait(key, serial, wait.holder, self._now(), until))

    def _is_awaited(self, key: str, serial: int, wait: Wait) -> bool:
        """False: its flight has ended, since all its claims are of those that do not wait."""
        self._must_wait(key, serial, wait)
        flight = self._flights.get(key)
        return flight is not None and flight.serial == serial

    async def _is_shared(self, key: str, serial: int) -> bool:
        """False: a compile of this node would not get into the store, so no other node should wait for it.

        That may be why another node that had the lease has nothing to show: so after a wait the store is tried first.
        """
        flight = self._flights.get(key)
        waited = flight is not None and flight.serial == serial and flight.waited
        return not self.tiers.store.faulty and (not waited or await self.tiers.store.takes_artifacts())

    async def _end(self, action: act.EndLease) -> None:
        asking = self._asking.pop(action.serial, None)
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await self._held.give_back(action.key, action.serial)

    async def _fail(self, action: act.FailLease) -> None:
        await self._held.fail(action.key, action.serial, action.log, action.where)

    async def _announce(self, action: act.Announce) -> None:
        """The lease is renewed until the store has the artifact, so that nobody compiles it meanwhile."""
        key, serial = action.key, action.serial
        asking = self._asking.pop(serial, None)
        if asking is not None:
            asking.cancel()
        manifest = None
        try:
            manifest = action.manifest or await self.tiers.into_store(key, Path(action.home))
        finally:
            if manifest is None:
                await self._held.give_back(key, serial)
        if manifest is not None:
            await self._held.ready(key, serial, manifest)

    # The right to hedge.

    async def _ask_hedge(self, action: act.AskHedge) -> None:
        key, serial = action.key, action.serial
        won = await self._hedges.take(key, serial)
        self._report(self._flights.hedge_answered(key, serial, won, self._now()))
        if not won and serial not in self._following:
            self._following[serial] = self._run(serial, self._follow(key, serial))

    async def _end_hedge(self, action: act.EndHedge) -> None:
        announcing = self._announcing.get(action.key)
        if announcing is not None:  # else another node hedges in the moment before it hears that the key is READY
            await asyncio.wait({announcing})
        await self._hedges.give_back(action.key, action.serial)

    async def _follow(self, key: str, serial: int) -> None:
        async def fetch(home: Path, manifest: str) -> bool:
            return await self.tiers.from_store(key, home, manifest) is not None

        try:
            home = await self._hedges.follow(key, serial, fetch)
            if home is not None:
                self._report(self._flights.landed(key, str(home)))
        finally:
            del self._following[serial]

    # Artifacts.

    async def _look(self, action: act.Look) -> None:
        key = action.key
        manifest = await self.tiers.from_store(key, Path(action.home), None)
        if manifest is None and self.tiers.distrusts(key):
            # this node's compile stays here: no other node should wait for it
            await self._held.give_back(key, action.serial)
        self._report(self._flights.looked(key, action.serial, action.home, manifest, self._now()))

    async def _fetch(self, action: act.Fetch) -> None:
        key, home = action.key, Path(action.home)
        found = packed = await self.tiers.from_pack(key, home, action.manifest)
        if not found:
            found = await self.tiers.from_store(key, home, action.manifest) is not None
        self._report(self._flights.fetched(key, action.serial, action.home if found else None, packed=packed))
