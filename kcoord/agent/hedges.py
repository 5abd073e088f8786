"""The errands of hedges: the right to compile beside a slow leader, and the news of what a hedge on another node published."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from kcoord.agent import actions as act
from kcoord.agent.flight import State
from kcoord.agent.flights import Flights
from kcoord.agent.held_leases import HeldLeases
from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import LeaseService, Ready, Wait, Won

_RECHECK = 2.0  # seconds; a lost wake-up costs at most this much


class Hedges:
    """Part of `kcoord.agent.lease_tasks.Errands`, whose ``run(serial, work)`` makes a task of a flight's work, and whose
    ``fetch(key, home, manifest)`` brings what was announced to `home`; None: it is not to be had. ``announcing(key)`` is what
    tells other nodes of the key now, if something does. `report` gets the actions that follow from a result.
    """

    def __init__(
        self,
        leases: LeaseService,
        held: HeldLeases,
        flights: Flights,
        now: Callable[[], float],
        report: Callable[[list[act.Action]], None],
        run: Callable[[int, Coroutine[Any, Any, None]], asyncio.Task[None]],
        fetch: Callable[[str, Path, str], Awaitable[str | None]],
        announcing: Callable[[str], asyncio.Task[None] | None],
    ) -> None:
        self._leases, self._held, self._flights, self._now = leases, held, flights, now
        self._report, self._run, self._fetch, self._announcing = report, run, fetch, announcing
        self._following: dict[int, asyncio.Task[None]] = {}  # flights whose waiters hear what another node publishes
        self._asking: set[tuple[str, int]] = set()  # leases that may be ours before we know

    async def ask(self, action: act.AskHedge) -> None:
        """The right to hedge is a lease of its own, so that one rank of all nodes has it."""
        lease, serial = _right(action.key), action.serial
        self._asking.add((lease, serial))
        try:
            won = isinstance(await self._leases.acquire(lease, self._held.token(serial), platform.node()), Won)
            if won:
                await self._held.keep(lease, serial)
                won = await self._still_led(action.key, serial)
        except LeaseUnavailable:
            won = False  # a duplicate that nobody limits is worse than a wait that is bounded
        if not won and (lease, serial) in self._held:
            await self._held.give_back(lease, serial)
        self._asking.discard((lease, serial))
        self._report(self._flights.hedge_answered(action.key, serial, won, self._now()))
        if not won and serial not in self._following:
            self._following[serial] = self._run(serial, self._follow(action.key, serial))

    async def _still_led(self, key: str, serial: int) -> bool:
        """Whether the leader still compiles. One on another node may have landed and given the right back since our last look."""
        if not self._waits(key, serial):
            return True
        token = self._held.token(serial)
        answer = await self._leases.acquire(key, token, platform.node())
        if isinstance(answer, Won) and not self._waits(key, serial) and (key, serial) not in self._held:
            await self._held.quietly(self._leases.release(key, token))  # the flight has just ended
        return isinstance(answer, Wait)  # what else there is, the flight hears by itself

    def _waits(self, key: str, serial: int) -> bool:
        """Whether the flight has no leader on this node."""
        flight = self._flights.get(key)
        return flight is not None and flight.serial == serial and flight.state is State.ASKING

    async def end(self, action: act.EndHedge) -> None:
        """Give the right back."""
        announcing = self._announcing(action.key)
        if announcing is not None:  # else another node goes ahead in the moment before it is told that all is done
            await asyncio.wait({announcing})
        await self._held.give_back(_right(action.key), action.serial)

    def asked_for(self) -> list[tuple[str, int]]:
        """The leases that were being asked for, also by an errand that was cancelled before it heard: they may be ours."""
        return list(self._asking)

    def stop(self) -> None:
        """Wait for no other node any more."""
        for task in self._following.values():
            task.cancel()

    async def _follow(self, key: str, serial: int) -> None:
        """A rank of another node compiles beside this node's leader: what it publishes is for those who wait here, too."""
        token = self._held.token(serial)
        try:
            async with self._leases.watch(key) as watch:
                while (led := self._led_with_waiters(key, serial)) is not None:
                    answer = await self._leases.acquire(key, token, platform.node())
                    if isinstance(answer, Ready) and await self._fetch(key, led, answer.manifest) is not None:
                        self._report(self._flights.landed(key, str(led)))
                        return
                    if isinstance(answer, Won) and (key, serial) not in self._held:
                        # this flight leads without the lease, or has just ended: no other node is to wait for it
                        await self._held.quietly(self._leases.release(key, token))
                        return
                    await watch.changed(_RECHECK)
        except LeaseUnavailable:
            return  # they wait for their own leader, as before
        finally:
            del self._following[serial]

    def _led_with_waiters(self, key: str, serial: int) -> Path | None:
        """Where the first waiter of a flight that is compiled on this node wants the artifact; None if that is over."""
        flight = self._flights.get(key)
        if flight is None or flight.serial != serial or flight.state is not State.LEADING or not flight.waiters:
            return None
        return Path(next(iter(flight.waiters.values())).home)


def _right(key: str) -> str:
    """The name of the lease that is the right to compile beside a slow leader."""
    return f"{key}-hedge"
