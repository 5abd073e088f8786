"""The leases that this agent has, each for one of its flights, and keeps alive."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AsyncExitStack

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import LeaseService, kept_alive
from kcoord.telemetry.events import Notices


class HeldLeases:
    """A lease is known by its key and the serial of its flight, which is in its token. `ttl` in seconds."""

    def __init__(self, leases: LeaseService, notices: Notices, agent_id: str, ttl: float) -> None:
        self._leases, self._notices, self._agent_id, self._ttl = leases, notices, agent_id, ttl
        self._renewals: dict[tuple[str, int], AsyncExitStack] = {}

    def __len__(self) -> int:
        return len(self._renewals)

    def __contains__(self, lease: tuple[str, int]) -> bool:
        return lease in self._renewals

    def all(self) -> list[tuple[str, int]]:
        return list(self._renewals)

    def token(self, serial: int) -> str:
        return f"{self._agent_id}.{serial}"

    async def keep(self, key: str, serial: int) -> None:
        """From now on it is renewed."""
        stack = AsyncExitStack()
        await stack.enter_async_context(kept_alive(self._leases, key, self.token(serial), self._ttl))
        self._renewals[key, serial] = stack

    async def stop_renewing(self, key: str, serial: int) -> None:
        """Once this returns, no renewal follows."""
        stack = self._renewals.pop((key, serial), None)
        if stack is not None:
            await stack.aclose()

    async def give_back(self, key: str, serial: int) -> None:
        """Whether or not it is ours."""
        await self.stop_renewing(key, serial)
        await self.quietly(self._leases.release(key, self.token(serial)))

    async def quietly(self, command: Awaitable[object]) -> None:
        """End a lease by `command`; without a service that can be used it ends by its TTL."""
        try:
            await command
        except LeaseUnavailable as error:
            self._notices.tell(f"no lease service can be used ({error}): leases end by their TTL")
