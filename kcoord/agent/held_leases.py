"""The leases of this agent's flights."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Failed, Lease, LeaseService, Ready, Wait, await_turn
from kcoord.telemetry.events import Notices


class HeldLeases:
    """The commands of flights to `service`, which records the leases. A flight's serial number is its token. `ttl` in seconds.

    A command that ends a lease does not raise: a fault of the service is told, and the lease ends by its TTL.
    """

    def __init__(self, service: LeaseService, notices: Notices, agent_id: str, ttl: float) -> None:
        self.service = service
        self._notices, self._prefix, self._ttl = notices, f"{agent_id}.flight-", ttl

    def __len__(self) -> int:
        return len(self._of_flights())

    async def await_turn(
        self,
        key: str,
        serial: int,
        void: str | None,
        *,
        on_wait: Callable[[Wait], None],
        stays: Callable[[Wait], bool],
    ) -> Lease | Ready | Failed | None:
        """`kcoord.leases.base.await_turn`, and renew from then on."""
        token, host = self._token(serial), platform.node()
        answer = await await_turn(self.service, key, token, host, void=void, on_wait=on_wait, stays=stays)
        return self._renewed(answer) if isinstance(answer, Lease) else answer

    async def ready(self, key: str, serial: int, manifest: str) -> None:
        """Announce that the key is in the store, as its holder or without a lease."""
        lease = self._get(key, serial)
        await self._quietly(lease.ready(manifest) if lease is not None else self.service.ready(key, manifest))

    async def fail(self, key: str, serial: int, log: str, where: str) -> None:
        if (lease := self._get(key, serial)) is not None:
            await self._quietly(lease.fail(log, where))

    async def give_back(self, key: str, serial: int) -> None:
        if (lease := self._get(key, serial)) is not None:
            await self._quietly(lease.release())

    async def give_all_back(self) -> None:
        await asyncio.gather(*(self._quietly(lease.release()) for lease in self._of_flights()))

    def _of_flights(self) -> list[Lease]:
        return [lease for lease in self.service.held.values() if lease.token.startswith(self._prefix)]

    def _get(self, key: str, serial: int) -> Lease | None:
        return self.service.held.get((key, self._token(serial)))

    def _token(self, serial: int) -> str:
        return f"{self._prefix}{serial}"

    def _renewed(self, lease: Lease) -> Lease:
        if lease.fence:
            lease.keep_alive(self._ttl)
        return lease

    async def _quietly(self, command: Awaitable[object]) -> None:
        try:
            await command
        except LeaseUnavailable as error:
            self._notices.tell(f"no lease service can be used ({error}): leases end by their TTL")
