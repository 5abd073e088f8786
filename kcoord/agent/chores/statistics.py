"""A job's counters over all agents: this node's ledger, and through Redis the ledgers of the other nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kcoord.agent.chores.chore import Chore, Lane
from kcoord.errors import LeaseUnavailable, StoreError
from kcoord.leases.base import within
from kcoord.protocol.identity import UNNAMED
from kcoord.ranks import launch_of
from kcoord.telemetry.counters import complete
from kcoord.telemetry.events import Notices, log
from kcoord.telemetry.job_names import directory_name
from kcoord.telemetry.ledger import Ledger, add_up

ByAgent = dict[str, dict[str, float]]
Share = Callable[[str, str, dict[str, float], bool], Awaitable[ByAgent]]
"""``share(job, agent, counters, read)`` stores an agent's counters where all nodes see them; with `read` it returns all agents'.
`job` is the name of the job's directory, which a server may take as it is.
"""

_PATIENCE = 5.0  # seconds that an answer waits for the disk


class Statistics:
    """Keeps the counters of `agent` on its node's disk, and shares them. No method raises for the sake of a disk or of Redis."""

    def __init__(
        self,
        ledger: Ledger,
        agent: str,
        notices: Notices,
        share: Share | None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._ledger, self._agent, self._notices, self._share = ledger, agent, notices, share
        self._launch = launch_of(environ) or agent  # unnamed jobs of other nodes and days are no part of ours
        self._unshared: set[str] = set()  # jobs
        self._sharing = asyncio.Lock()  # a share replaces the one before: the older sums must not come last
        self._lane = Lane("statistics")
        self._lane.submit(ledger.forget_old, "old statistics stay")
        # no rest: a dead Redis delays no heartbeat, and the counters are few
        self.chores = [Chore("statistics", self._lane, self._save, notices, wanted=self._has_changes, last=self._save)]

    def add(self, job: str, counters: dict[Any, Any]) -> None:
        self._ledger.add(job, counters)

    def latest(self, most: int) -> dict[str, dict[str, float]]:
        """By job, the counters of this agent alone; of the jobs that began last."""
        return {job: complete(self._ledger.mine(job)) for job in self._ledger.latest(most)}

    async def answer(self, job: str | None) -> dict[str, Any]:
        """The sums of one job, or of all that this node knows. While the disk hangs: of this agent's own counters."""
        by_job = await self._on_this_node(job)
        shares = self._share is not None
        for name in by_job:
            everywhere = await self._shared(name, read=True) if shares else None
            shares = everywhere is not None  # Redis that does not answer is not asked for each job
            by_job[name] = (everywhere or {}) | by_job[name]
        return add_up(by_job)

    async def _on_this_node(self, job: str | None) -> dict[str, ByAgent]:
        def read() -> dict[str, ByAgent]:
            return {name: self._ledger.by_agent(name) for name in ([job] if job else self._ledger.jobs())}

        try:
            return await within(_PATIENCE, self._lane.run(read))
        except (OSError, asyncio.TimeoutError) as error:
            log.info("statistics of this agent only: %s", error or "the disk does not answer")
            return {job: {self._agent: self._ledger.mine(job)}} if job else {}

    def _has_changes(self) -> bool:
        return bool(self._ledger.unsaved or self._unshared)

    async def _save(self) -> None:
        changed: list[str] = []
        try:
            changed = await self._lane.run(self._ledger.save)
        except (OSError, StoreError) as error:
            self._notices.tell(f"statistics are not kept: {error}", about="statistics")
        if self._share is not None:
            self._unshared.update(changed)
        for job in sorted(self._unshared):
            if await self._shared(job, read=False) is None:
                return  # Redis does not answer: again at the next pulse
            self._unshared.discard(job)

    async def _shared(self, job: str, *, read: bool) -> ByAgent | None:
        """The counters of all agents, if `read`. None: there is nobody to share with, or no answer."""
        if self._share is None:
            return None
        try:
            async with self._sharing:
                name = f"{job} {self._launch}" if job == UNNAMED else job
                return await self._share(directory_name(name), self._agent, self._ledger.mine(job), read)
        except LeaseUnavailable as error:
            log.info("statistics of this node only: %s", error)
            return None
