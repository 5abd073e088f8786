"""Compiles beside a slow leader, over all nodes.

A flight's leader holds the lease of its key, or another node's does. The *right to hedge* is a second lease, ``<key>-hedge``, so
that one rank of all nodes compiles beside a slow leader. Its holder publishes as any leader does; nodes whose own leader compiles
meanwhile follow the key, to hear of that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from kcoord.agent.flight import Flight, State
from kcoord.agent.flights import Flights
from kcoord.agent.held_leases import HeldLeases
from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import RECHECK, Lease, Ready, Wait


class Hedges:
    """The right to hedge of each flight in `flights`, and what hedges of other nodes publish."""

    def __init__(self, held: HeldLeases, flights: Flights) -> None:
        self._held, self._flights = held, flights

    async def take(self, key: str, serial: int) -> bool:
        """Take the right, without waiting. False: another rank has it, no service can tell, or the leader has just landed.

        While nodes may use different services, each of these would give it to somebody: then nobody hedges.
        """
        right = _right(key)
        try:
            if not isinstance(await self._held.take(right, serial), Lease):
                return False
            if self._held.service.agreed and await self._is_led(key, serial):
                return True
        except LeaseUnavailable:
            pass  # a bounded wait is better than compiles that nobody limits
        await self._held.give_back(right, serial)
        return False

    async def _is_led(self, key: str, serial: int) -> bool:
        """A leader on another node lands before it gives its right back; who polls may hear of both in the wrong order."""
        flight = self._flight(key, serial)
        led_elsewhere = flight is not None and flight.state is State.ASKING
        return not led_elsewhere or isinstance(await self._held.service.look(key), Wait)

    async def give_back(self, key: str, serial: int) -> None:
        await self._held.give_back(_right(key), serial)

    async def follow(self, key: str, serial: int, fetch: Callable[[Path, str], Awaitable[bool]]) -> Path | None:
        """Wait for another node to publish what a rank of this node compiles, and fetch it for those who wait for that rank.

        ``fetch(home, manifest)`` is True if the artifact is at `home` now. Returns that home; None: nobody waits any more, or no
        service can tell.
        """
        try:
            async with self._held.service.watch(key) as watch:
                while (home := self._awaited_home(key, serial)) is not None:
                    answer = await self._held.service.look(key)
                    if isinstance(answer, Ready) and await fetch(home, answer.manifest):
                        return home
                    await watch.changed(RECHECK)
        except LeaseUnavailable:
            pass  # they wait for their own leader, as before
        return None

    def _awaited_home(self, key: str, serial: int) -> Path | None:
        """The home at which the first waiter wants the artifact that a rank of this node compiles."""
        flight = self._flight(key, serial)
        if flight is None or flight.state is not State.LEADING or not flight.waiters:
            return None
        return Path(next(iter(flight.waiters.values())).home)

    def _flight(self, key: str, serial: int) -> Flight | None:
        flight = self._flights.get(key)
        return flight if flight is not None and flight.serial == serial else None


def _right(key: str) -> str:
    return f"{key}-hedge"
