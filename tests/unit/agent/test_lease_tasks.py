"""The leases that an agent's tasks leave in the lease service."""

from __future__ import annotations

import asyncio
import time

from kcoord.agent import actions as act
from kcoord.agent.flights import Flights
from kcoord.agent.lease_tasks import Errands
from kcoord.leases.base import Failed, Lease, Ready, Wait, Watch, Won, within
from kcoord.leases.local import LocalLeases
from kcoord.telemetry.events import Notices

KEY, SLOW = "key", 0.05


def errands_of(flights: Flights, leases: LocalLeases, answered: list[act.Reply] | None = None) -> Errands:
    """Carries out the actions that follow, but for the answers to ranks."""

    def report(actions: list[act.Action]) -> None:
        for action in actions:
            if not isinstance(action, act.Reply):
                errands.start(action)
            elif answered is not None:
                answered.append(action)

    errands = Errands(leases, None, flights, Notices(), agent_id="us", ttl=15.0, now=time.monotonic, report=report)
    return errands


def slow_flight(flights: Flights, now: float) -> list[act.Action]:
    """The first of two ranks compiles `KEY`, without the lease, and is slow; what follows from that."""
    for n in (1, 2):
        flights.claim(act.Claimant(n, n, KEY, f"/home/{n}", f"rank {n}", now + 60, hedge_after=SLOW), now)
    flights.lease_answered(KEY, 1, Won(0), now)
    flights.looked(KEY, 1, None, now)
    return flights.tick(now + SLOW)


def test_who_hears_of_another_node_s_hedge_takes_no_lease_that_its_flight_does_not_have() -> None:
    """A node whose store is full compiles without the lease, so that no other node waits for what it cannot publish."""

    async def scenario() -> None:
        asked = asyncio.Event()

        class Leases(LocalLeases):
            async def look(self, key: str) -> Ready | Failed | Wait | None:
                answer = await super().look(key)
                if key == KEY:
                    asked.set()
                return answer

        leases = Leases(15.0, 900.0, 30.0)
        flights = Flights(limit=900.0, failure_ttl=30.0)
        errands = errands_of(flights, leases)
        (ask,) = slow_flight(flights, time.monotonic())
        assert isinstance(ask, act.AskHedge)
        assert isinstance(await leases.acquire(f"{KEY}-hedge", "theirs", "another node"), Lease)
        errands.start(ask)
        await within(10.0, asked.wait())
        assert isinstance(await leases.acquire(KEY, "theirs", "another node"), Lease)
        assert isinstance(await leases.acquire(KEY, "ours", "us"), Wait)
        await errands.drain(1.0)

    asyncio.run(scenario())


def test_the_right_to_hedge_is_given_back_by_an_agent_that_ends_before_it_hears_that_it_has_it() -> None:
    async def scenario() -> None:
        granted = asyncio.Event()

        class Leases(LocalLeases):
            async def take(self, lease: Lease, void: str | None) -> Won | Ready | Failed | Wait:
                answer = await super().take(lease, void)
                if lease.holder != "another node":
                    granted.set()
                    await asyncio.sleep(600)  # the answer is on its way
                return answer

        leases = Leases(15.0, 900.0, 30.0)
        flights = Flights(limit=900.0, failure_ttl=30.0)
        errands = errands_of(flights, leases)
        (ask,) = slow_flight(flights, time.monotonic())
        assert isinstance(ask, act.AskHedge)
        errands.start(ask)
        await within(10.0, granted.wait())
        assert isinstance(await leases.acquire(f"{KEY}-hedge", "theirs", "another node"), Wait)
        await errands.drain(0.05)
        assert isinstance(await leases.acquire(f"{KEY}-hedge", "theirs", "another node"), Lease)

    asyncio.run(scenario())


def test_nobody_goes_ahead_of_a_leader_on_another_node_that_has_just_landed() -> None:
    """Who waits by polling hears of it later than the right to a hedge is free."""

    async def scenario() -> None:
        given_back = asyncio.Event()

        class Deaf(Watch):
            async def changed(self, timeout: float) -> bool:
                await asyncio.sleep(600)
                return True

            async def __aenter__(self) -> Watch:
                return self

            async def __aexit__(self, *exc: object) -> None:
                pass

        class Leases(LocalLeases):
            def watch(self, key: str) -> Watch:
                return Deaf()

            async def release(self, lease: Lease) -> bool:
                released = await super().release(lease)
                if lease.key == f"{KEY}-hedge":
                    given_back.set()
                return released

        leases, answered = Leases(15.0, 900.0, 30.0), []
        flights = Flights(limit=900.0, failure_ttl=30.0)
        errands = errands_of(flights, leases, answered)
        theirs = await leases.acquire(KEY, "theirs", "another node")
        assert isinstance(theirs, Lease)
        now = time.monotonic()
        (ask,) = flights.claim(act.Claimant(1, 1, KEY, "/home/1", "rank 1", now + 60, hedge_after=SLOW), now)
        errands.start(ask)
        flight = flights.get(KEY)
        assert flight is not None
        while not flight.remote:
            await asyncio.sleep(0.01)
        await theirs.ready("a manifest")
        await asyncio.sleep(SLOW)
        (ask,) = flights.tick(time.monotonic())
        assert isinstance(ask, act.AskHedge)
        errands.start(ask)
        await within(10.0, given_back.wait())
        await errands.drain(0.05)
        assert answered == []

    asyncio.run(scenario())
