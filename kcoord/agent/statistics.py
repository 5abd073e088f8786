"""A job's counters over all agents: this node's ledger, and through Redis those of the other nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kcoord.agent.ledger import Ledger, add_up
from kcoord.errors import LeaseUnavailable
from kcoord.telemetry.events import Notices, log

Share = Callable[[str, str, dict[str, float], bool], Awaitable[dict[str, dict[str, float]]]]
"""``share(job, agent, counters, read)`` stores one agent's counters where all nodes see them; with `read` it returns all agents'."""


class Statistics:
    """What `agent` counted, kept and shared. Losing any of it harms no job."""

    def __init__(self, ledger: Ledger, agent: str, notices: Notices, share: Share | None) -> None:
        self._ledger, self._agent, self._notices, self._share = ledger, agent, notices, share

    def add(self, job: str, counters: dict[Any, Any]) -> None:
        self._ledger.add(job, counters)

    async def save(self) -> None:
        """Keep what has changed since the last time, and share it."""
        try:
            changed = await asyncio.to_thread(self._ledger.save)
        except OSError as error:
            self._notices.tell(f"statistics are not kept: {error}")
            return
        for job in changed:
            await self._shared(job, read=False)

    async def total(self, job: str | None) -> dict[str, Any]:
        """The sums of one job, or of all that this node knows."""
        by_job = {}
        for name in [job] if job else self._ledger.jobs():
            by_job[name] = await self._shared(name, read=True) | self._ledger.by_agent(name)
        return add_up(by_job)

    async def _shared(self, job: str, *, read: bool) -> dict[str, dict[str, float]]:
        if self._share is None:
            return {}
        try:
            return await self._share(job, self._agent, self._ledger.mine(job), read)
        except LeaseUnavailable as error:
            log.info("statistics of this node only: %s", error)
            return {}
