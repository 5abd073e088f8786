"""Carries out the actions of flights on leases and artifacts.

A cold claim is one coroutine, `acquire`: the lease, then the pack or the store, then the answer.
"""

from __future__ import annotations

import asyncio
import functools
import platform
from collections.abc import Awaitable, Callable
from pathlib import Path

from kcoord.agent import flights as act
from kcoord.agent.flights import Flights
from kcoord.agent.tiers import Tiers
from kcoord.errors import LeaseUnavailable
from kcoord.latest import Latest
from kcoord.leases.base import Failed, Lease, LeaseService, Ready, Unleased, Wait, await_turn
from kcoord.protocol import messages
from kcoord.telemetry.events import Notices, log, tell_if_failed

_MOST_PASSING = 20_000
_BUSY_FOR = 2.0  # seconds in which claims that do not wait do not ask again for a key that another node compiles
_ANOTHER_STORES = 3  # artifacts that the store lacks, until it is told


class Acquisition:
    """Carries out the actions of one agent's flights, each as a task; `report` gets the actions that follow from a result.

    A flight's serial number is the token of its lease, which lasts for `ttl` seconds and is renewed. A command that ends a lease
    does not raise: a fault of the service is told, and the lease ends by its TTL.
    """

    def __init__(
        self,
        leases: LeaseService,
        tiers: Tiers,
        flights: Flights,
        notices: Notices,
        *,
        agent_id: str,
        ttl: float,
        now: Callable[[], float],
        report: Callable[[list[act.Action]], None],
    ) -> None:
        self._leases, self._tiers, self._flights, self._notices = leases, tiers, flights, notices
        self._prefix, self._ttl, self._now, self._report = f"{agent_id}.flight-", ttl, now, report
        self.passing: Latest[str, None] = Latest(_MOST_PASSING)
        """Homes in directories that their ranks throw away. A lease for them would hold up other nodes, which get nothing."""
        self._held: dict[tuple[str, int], Lease] = {}  # by key and serial number: won, and not given up
        self._tasks: dict[asyncio.Task[None], act.Task] = {}
        self._acquiring: dict[int, asyncio.Task[None]] = {}  # by the flight's serial number
        self._untrue: set[str] = set()  # keys of READYs whose artifact the store lacks
        self._ends = False

    def start(self, action: act.Task) -> None:
        """Begin `action`; the actions that follow from its result go to `report`."""
        if isinstance(action, act.Acquire) and self._ends:
            return  # nobody would give the lease back
        if isinstance(action, act.Acquire):
            task = self._acquiring[action.serial] = asyncio.create_task(self._acquired(action))
        elif isinstance(action, act.Upload):
            task = asyncio.create_task(self._upload(action))
        else:
            task = asyncio.create_task(self._end(action))
        self._tasks[task] = action
        task.add_done_callback(self._done)

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    @property
    def uploads(self) -> int:
        """The number of artifacts that are on their way into the store."""
        return len(self._uploading())

    @property
    def held(self) -> int:
        """The number of leases that this agent's flights hold."""
        return len(self._held)

    async def uploaded(self, timeout: float) -> None:
        """Wait until the artifacts that are on their way are in the store, for `timeout` seconds at most."""
        if uploading := self._uploading():
            await asyncio.wait(uploading, timeout=timeout)

    async def drain(self, timeout: float, giving_back: float = 5.0) -> None:
        """Stop waiting for other nodes, let publishes finish within `timeout` seconds, and give the leases back within
        `giving_back` seconds.
        """
        self._ends = True
        for task in self._acquiring.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        back = asyncio.create_task(self._give_all_back())
        _, late = await asyncio.wait({back}, timeout=giving_back)
        if late:
            back.cancel()
            log.info("leases were not given back within %g s: they end by their TTL", giving_back)

    async def acquire(self, key: str, serial: int, home: Path) -> list[act.Action]:
        """From the lease to the artifact, which comes to `home`, or to the right to compile. Returns the actions that follow.

        A second READY that proves untrue ends in that right, too, and so does one that only this node cannot use: without a
        lease, for it may be true for others.
        """
        void, tiers, flights = None, self._tiers, self._flights
        for _ in range(2):
            answer = await self._turn(key, serial, void)
            if not isinstance(answer, Ready):
                break
            if packed := await tiers.from_pack(key, home, answer.manifest):
                return flights.found(key, serial, str(home), packed=packed)
            if await tiers.from_store(key, home, answer.manifest) is not None:
                return flights.found(key, serial, str(home))
            void = answer.manifest
            if tiers.store.faulty or key in tiers.distrusted:
                break
            if key not in tiers.refused:
                self._note_untrue(key)
        if isinstance(answer, Failed):
            return flights.failed_elsewhere(key, serial, answer.log, answer.where, self._now())
        if not isinstance(answer, Ready):  # no other node publishes now, but an earlier job may have
            manifest = await tiers.from_store(key, home, None)
            if manifest is not None:
                return flights.found(key, serial, str(home), manifest)
            if key in tiers.distrusted:  # this node's compile stays here: no other node should wait for it
                await self._give_back(key, serial)
        return flights.may_compile(key, serial, self._now())

    def _note_untrue(self, key: str) -> None:
        """The store lacks an artifact that a node has announced. One may have been removed; several are another store's."""
        if key not in self._untrue and len(self._untrue) < _ANOTHER_STORES:
            self._untrue.add(key)
            if len(self._untrue) == _ANOTHER_STORES:
                self._notices.tell(
                    f"the store {self._tiers.store.root} lacks kernels that other nodes have published: they were removed, or "
                    "these nodes have another store: set the same KCOORD_STORE on all nodes, or a KCOORD_NAMESPACE for each store"
                )

    async def _turn(self, key: str, serial: int, void: str | None) -> Lease | Unleased | Ready | Failed:
        """The lease service's answer, or a pack's READY."""
        if void is None and (packed := await self._tiers.packs.announced(key)) is not None:
            return Ready(packed)
        flight = self._flights.acquiring(key, serial)
        if flight is None or (flight.waiters and all(w.home in self.passing for w in flight.waiters.values())):
            return Unleased()
        stays = functools.partial(self._is_awaited, key, serial)
        token, host = f"{self._prefix}{serial}", platform.node()
        try:
            answer = await await_turn(self._leases, key, token, host, void=void, stays=stays)
        except LeaseUnavailable as error:
            self._notices.tell(f"no lease service can be used ({error}): this node coordinates its own ranks only")
            return Unleased()
        if isinstance(answer, Lease):
            self._held[key, serial] = answer
            answer.keep_alive(self._ttl)
            # no other node should wait for a compile that would not get into the store; that may be why another node which had
            # the lease has nothing to show, so after a wait the store is tried first
            if self._tiers.store.faulty or (flight.waited and not await self._tiers.store.takes_artifacts()):
                await self._give_back(key, serial)
                return Unleased()
        return Unleased() if answer is None else answer  # None: the flight has ended

    def _is_awaited(self, key: str, serial: int, wait: Wait) -> bool:
        """Tell the flight that another node compiles. False: it has ended, since none of its claims waits."""
        until = self._now() + min(_BUSY_FOR, wait.ttl)
        self._report(self._flights.must_wait(key, serial, wait.holder, self._now(), until))
        return self._flights.acquiring(key, serial) is not None

    async def _acquired(self, action: act.Acquire) -> None:
        self._report(await self.acquire(action.key, action.serial, Path(action.home)))

    async def _end(self, action: act.EndLease) -> None:
        await self._stop_acquiring(action.serial)
        await self._give_back(action.key, action.serial, action.failure)

    async def _upload(self, action: act.Upload) -> None:
        """Publish in the store, then announce. The lease is renewed until then, so that no other node compiles meanwhile."""
        key, serial = action.key, action.serial
        if action.manifest is None:  # else it is the acquiring task that has found it
            await self._stop_acquiring(serial)
        manifest = None
        try:
            manifest = action.manifest or await self._tiers.into_store(key, Path(action.home))
        finally:
            if manifest is None:
                await self._give_back(key, serial)
        if manifest is not None:
            lease = self._held.pop((key, serial), None)
            await self._quietly(lease.ready(manifest) if lease is not None else self._leases.ready(key, manifest))

    async def _stop_acquiring(self, serial: int) -> None:
        acquiring = self._acquiring.pop(serial, None)
        if acquiring is not None and acquiring is not asyncio.current_task():
            acquiring.cancel()
            await asyncio.gather(acquiring, return_exceptions=True)

    async def _give_back(self, key: str, serial: int, failure: messages.Failed | None = None) -> None:
        if (lease := self._held.pop((key, serial), None)) is not None:
            await self._quietly(lease.release() if failure is None else lease.fail(failure.log, failure.where))

    async def _give_all_back(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._give_back(*name) for name in list(self._held)))

    async def _quietly(self, command: Awaitable[object]) -> None:
        try:
            await command
        except LeaseUnavailable as error:
            self._notices.tell(f"no lease service can be used ({error}): leases end by their TTL")

    def _uploading(self) -> list[asyncio.Task[None]]:
        return [task for task, action in self._tasks.items() if isinstance(action, act.Upload)]

    def _done(self, task: asyncio.Task[None]) -> None:
        action = self._tasks.pop(task)
        if isinstance(action, act.Acquire):
            self._acquiring.pop(action.serial, None)
        if tell_if_failed(task, "a lease task failed", self._notices.tell):
            self._report(self._flights.derailed(action.key, action.serial))
