"""A job's counters over all agents: this node's ledger, and through Redis those of the other nodes.

The node's disk has a thread of its own here, which it may hold for ever: nothing else waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import within
from kcoord.telemetry.events import Notices, log
from kcoord.telemetry.job_names import directory_name
from kcoord.telemetry.ledger import Ledger, add_up

T = TypeVar("T")
ByAgent = dict[str, dict[str, float]]
Share = Callable[[str, str, dict[str, float], bool], Awaitable[ByAgent]]
"""``share(job, agent, counters, read)`` stores an agent's counters where all nodes see them; with `read` it returns all agents'.
`job` is the name of the job's directory, which a server may take as it is.
"""

_PATIENCE = 5.0  # seconds that an answer waits for the disk


class Statistics:
    """What `agent` counted, kept and shared. Losing any of it harms no job: no method raises for a disk's or Redis' sake."""

    def __init__(self, ledger: Ledger, agent: str, notices: Notices, share: Share | None) -> None:
        self._ledger, self._agent, self._notices, self._share = ledger, agent, notices, share
        self._io = ThreadPoolExecutor(1, "statistics")
        self._saving: asyncio.Task[None] | None = None
        self._unshared: set[str] = set()
        self._sharing = asyncio.Lock()  # what is shared replaces what was: the older sums must not come last
        self._io.submit(ledger.forget_old)

    def add(self, job: str, counters: dict[Any, Any]) -> None:
        self._ledger.add(job, counters)

    def pulse(self) -> None:
        """Begin to keep and share what has changed, unless that is under way: a dead Redis must not delay a heartbeat."""
        if (self._saving is None or self._saving.done()) and (self._ledger.unsaved or self._unshared):
            self._saving = asyncio.create_task(self._save())
            self._saving.add_done_callback(self._done)

    async def drain(self, timeout: float) -> None:
        """Keep and share what is left, within `timeout` seconds; then no more is kept."""
        rest = asyncio.create_task(self._finish())
        rest.add_done_callback(self._done)
        _, late = await asyncio.wait({rest}, timeout=timeout)
        if late:
            rest.cancel()
            log.info("the last statistics were not kept within %g s", timeout)
        self._io.shutdown(wait=False, cancel_futures=True)

    async def answer(self, job: str | None) -> dict[str, Any]:
        """The sums of one job, or of all that this node knows. From a disk that hangs: what this agent counted itself."""
        by_job = await self._here(job)
        shares = self._share is not None
        for name in by_job:
            everywhere = await self._shared(name, read=True) if shares else None
            shares = everywhere is not None  # Redis that does not answer is not asked for each job
            by_job[name] = (everywhere or {}) | by_job[name]
        return add_up(by_job)

    async def _here(self, job: str | None) -> dict[str, ByAgent]:
        def read() -> dict[str, ByAgent]:
            return {name: self._ledger.by_agent(name) for name in ([job] if job else self._ledger.jobs())}

        try:
            return await within(_PATIENCE, self._in(read))
        except (OSError, asyncio.TimeoutError) as error:
            log.info("statistics of this agent only: %s", error or "the disk does not answer")
            return {job: {self._agent: self._ledger.mine(job)}} if job else {}

    async def _finish(self) -> None:
        if self._saving is not None:
            await asyncio.wait({self._saving})
        await self._save()

    async def _save(self) -> None:
        changed: list[str] = []
        try:
            changed = await self._in(self._ledger.save)
        except OSError as error:
            self._notices.tell(f"statistics are not kept: {error}", about="statistics")
        if self._share is not None:
            self._unshared.update(changed)
        for job in sorted(self._unshared):
            if await self._shared(job, read=False) is None:
                return  # Redis does not answer: again at the next pulse
            self._unshared.discard(job)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._notices.tell(f"an error in the agent, please report it: {type(error).__name__}: {error}")
            log.error("statistics were not kept", exc_info=error)

    async def _shared(self, job: str, *, read: bool) -> ByAgent | None:
        """None: there is nobody to share with, or nobody answers."""
        if self._share is None:
            return None
        try:
            async with self._sharing:
                return await self._share(directory_name(job), self._agent, self._ledger.mine(job), read)
        except LeaseUnavailable as error:
            log.info("statistics of this node only: %s", error)
            return None

    async def _in(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._io, work)
