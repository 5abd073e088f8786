"""What an agent's errands leave in the lease service."""

from __future__ import annotations

import asyncio
import time

from kcoord.agent import actions as act
from kcoord.agent.errands import Errands
from kcoord.agent.flights import Flights
from kcoord.leases.base import Wait, Won, within
from kcoord.leases.local import LocalLeases
from kcoord.telemetry.events import Notices

KEY, SLOW = "key", 0.05


def test_who_hears_of_another_node_s_hedge_takes_no_lease_that_its_flight_does_not_have() -> None:
    """A node whose store is full compiles without the lease, so that no other node waits for what it cannot publish."""

    async def scenario() -> None:
        asked = asyncio.Event()

        class Leases(LocalLeases):
            async def release(self, key: str, token: str) -> bool:
                released = await super().release(key, token)
                if key == KEY:
                    asked.set()
                return released

        leases = Leases(15.0, 900.0, 30.0)
        flights = Flights(limit=900.0, failure_ttl=30.0)
        errands: Errands

        def report(actions: list[act.Action]) -> None:
            for action in actions:
                if not isinstance(action, act.Tell):
                    errands.start(action)

        errands = Errands(
            leases, None, flights, Notices(), agent_id="us", ttl=15.0, now=time.monotonic, report=report
        )  # fmt: skip
        now = time.monotonic()
        for n in (1, 2):
            flights.claim(act.Claimant(n, n, KEY, f"/home/{n}", f"rank {n}", now + 60, hedge_after=SLOW), now)
        flights.lease_answered(KEY, 1, Won(0, coordinated=False), now)
        flights.looked(KEY, 1, None, now)
        assert isinstance(await leases.acquire(f"{KEY}-hedge", "theirs", "another node"), Won)
        report(flights.tick(now + SLOW))
        await within(10.0, asked.wait())
        assert isinstance(await leases.acquire(KEY, "theirs", "another node"), Won)
        assert isinstance(await leases.acquire(KEY, "ours", "us"), Wait)
        await errands.drain(1.0)

    asyncio.run(scenario())
