"""A lease service whose leases are named by key and token, for tests that draw these, or send them over a pipe."""

from __future__ import annotations

from kcoord.leases.base import Answer, Lease, LeaseService


class ByToken:
    """Remembers the latest lease of each key and token. A pair that never won one renews as if another service had given it."""

    def __init__(self, service: LeaseService) -> None:
        self.service, self._leases = service, dict[tuple[str, str], Lease]()

    def lease(self, key: str, token: str) -> Lease:
        if (key, token) not in self._leases:
            self._leases[key, token] = Lease(self.service, key, token, token, self.service._limit)  # type: ignore[attr-defined]
        return self._leases[key, token]

    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        answer = await self.service.acquire(key, token, holder, void=void)
        if isinstance(answer, Lease):
            self._leases[key, token] = answer
        return answer

    async def renew(self, key: str, token: str) -> bool:
        return await self.lease(key, token).renew()

    async def ready(self, key: str, token: str, manifest: str) -> None:
        await self.lease(key, token).ready(manifest)

    async def fail(self, key: str, token: str, log: str, where: str) -> bool:
        return await self.lease(key, token).fail(log, where)

    async def release(self, key: str, token: str) -> bool:
        return await self.lease(key, token).release()
