"""The leases of this agent's flights."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Failed, Lease, LeaseService, Ready, Unleased, Wait, await_turn
from kcoord.telemetry.events import Notices


class HeldLeases:
    """The commands of flights to `service`, and the leases that they hold. A flight's serial number is its token.
    `ttl` is in seconds.

    A command that ends a lease does not raise: a fault of the service is told, and the lease ends by its TTL.
    """

    def __init__(self, service: LeaseService, notices: Notices, agent_id: str, ttl: float) -> None:
        self.service = service
        self._notices, self._prefix, self._ttl = notices, f"{agent_id}.flight-", ttl
        self._leases: dict[tuple[str, int], Lease] = {}  # won, and not given up

    def __len__(self) -> int:
        return len(self._leases)

    async def await_turn(
        self, key: str, serial: int, void: str | None, stays: Callable[[Wait], bool]
    ) -> Lease | Unleased | Ready | Failed | None:
        """`kcoord.leases.base.await_turn`; a lease is renewed from then on."""
        token, host = f"{self._prefix}{serial}", platform.node()
        answer = await await_turn(self.service, key, token, host, void=void, stays=stays)
        if isinstance(answer, Lease):
            self._leases[key, serial] = answer
            answer.keep_alive(self._ttl)
        return answer

    async def ready(self, key: str, serial: int, manifest: str) -> None:
        """Announce that the key is in the store, as its holder or without a lease."""
        lease = self._leases.pop((key, serial), None)
        await self._quietly(lease.ready(manifest) if lease is not None else self.service.ready(key, manifest))

    async def fail(self, key: str, serial: int, log: str, where: str) -> None:
        if (lease := self._leases.pop((key, serial), None)) is not None:
            await self._quietly(lease.fail(log, where))

    async def give_back(self, key: str, serial: int) -> None:
        if (lease := self._leases.pop((key, serial), None)) is not None:
            await self._quietly(lease.release())

    async def give_all_back(self) -> None:
        await asyncio.gather(*(self.give_back(*name) for name in list(self._leases)))

    async def _quietly(self, command: Awaitable[object]) -> None:
        try:
            await command
        except LeaseUnavailable as error:
            self._notices.tell(f"no lease service can be used ({error}): leases end by their TTL")
