"""The agent: one asyncio process per node. This file has its life: the beginning, the pulse and the end."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import time
import uuid
from collections.abc import Coroutine, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import kcoord
from kcoord.agent.connections import Connection
from kcoord.agent.services import Services
from kcoord.artifacts.store import Store
from kcoord.leases.base import LeaseService
from kcoord.protocol import messages
from kcoord.protocol.endpoint import log_to_file
from kcoord.protocol.fields import HEARTBEAT
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices, tell_if_failed

if TYPE_CHECKING:
    from kcoord.agent.http_server import HttpService
    from kcoord.agent.metrics import Metrics
    from kcoord.agent.status_page import StatusPage

ENDS_WITHIN = 18.0
"""Seconds in which a stopped agent ends, whatever hangs: a launcher kills it after 20, Slurm and Kubernetes after 30."""
_JOBS_SHOWN = 8  # the latest
_LEARNS_WITHIN = 1.0  # seconds; the first rank may ask for a choice that the profile recorded
# The ends of the drain's phases, in seconds from its beginning.
_TAKEN_IN = 6.0  # the local tier has what ranks have published
_UPLOADED = 8.0  # the store has it, so that a pack can list it
_WRITTEN = 10.0  # profiles, packs and time lines are written, and late uploads are over
_GIVEN_BACK = 15.0  # leases are released
_CLOSED = 17.0  # connections to the lease service are closed


class Agent:
    """Serves one listening socket until it is stopped, or, as a daemon, until it has been idle for long enough.

    `metrics` and `page` are shown its state; `serves` are the services of both, by these names. `tells_clients`: notices go to a
    node's first rank too, for an agent whose own log nobody reads. `owned`: a launcher started it, and it ends with the last
    launcher that it serves.
    """

    def __init__(
        self,
        settings: Settings,
        leases: LeaseService,
        store: Store | None,
        notices: Notices,
        *,
        daemon: bool = False,
        tells_clients: bool = True,
        owned: bool = False,
        metrics: Metrics | None = None,
        page: StatusPage | None = None,
        serves: Mapping[str, HttpService] = MappingProxyType({}),
    ) -> None:
        self.id = f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._settings, self._leases, self._notices, self._daemon = settings, leases, notices, daemon
        self._metrics, self._page, self._serves = metrics, page, serves
        self._store_root = store.root if store is not None else None
        self._services = Services(settings, leases, store, notices, self.id, metrics, tells_clients=tells_clients)
        self._launchers = Launchers(owned, settings.job)
        self._services.handlers |= {
            messages.Status: lambda *_: messages.Facts(self.status()),
            messages.Stop: self._stop,
            messages.Attend: self._attend,
            messages.Leave: self._leave,
            messages.HandOver: self._hand_over,
        }
        self._started, self._last_used = time.time(), time.monotonic()
        self._stopping = asyncio.Event()
        # a claim that waits hears from us well within the time after which it takes us for dead
        self._beat = min(HEARTBEAT, settings.agent_timeout / 3)
        self._show()

    def stop(self) -> None:
        self._stopping.set()

    async def stopped(self) -> None:
        """Return once `stop` was called."""
        await self._stopping.wait()

    def hand_over(self) -> bool:
        """The owner ends. True: the agent goes on for other launchers."""
        stays = self._launchers.owner_leaves()
        if stays:
            log_to_file(self._settings.socket_path)
            self._services.connections.tells_clients = True
        return stays

    @property
    def handed_over(self) -> bool:
        """True once the agent goes on without its owner."""
        return self._launchers.handed_over

    def status(self) -> dict[str, Any]:
        """The agent, its settings and its flights, as ``kcoord status --json`` prints them."""
        services, root = self._services, self._store_root
        return {
            "agent": self.id,
            "pid": os.getpid(),
            "version": kcoord.__version__,
            "started": self._started,
            "coordinates": self._leases.name,
            "breaker": self._leases.breakers(),
            "clients": len(services.connections),
            "settings": self._settings.redacted(),
            "notices": list(dict.fromkeys(self._notices.since(0)[0])),
            "flights": services.claims.status(),
            "uploads": services.claims.acquisition.uploads,
            "leases": services.claims.acquisition.held,
            "store": None if root is None else {"root": str(root), "usable": not services.tiers.store.faulty},
            "jobs": services.timelines.latest(_JOBS_SHOWN),
            "packs": services.tiers.packs.status(),
            "pools": services.pools.status(),
            "hedges": services.claims.hedged,
            "stalls": services.claims.stalled,
            **{name: self._serves[name].bound if name in self._serves else None for name in ("metrics", "page")},
        }

    async def serve(self, listener: socket.socket) -> None:
        """Serve until stopped; then drain: finish publishes, release leases. The listener is closed."""
        if self._settings.recorded_as is not None:
            self._services.tiers.packs.begin(self._settings.recorded_as)
        learning = asyncio.create_task(self._learn())
        await asyncio.wait({learning}, timeout=_LEARNS_WITHIN)
        close = self._services.connections.listen(listener, self._services.answer, self._gone)
        pulse = asyncio.create_task(self._pulse())
        pulse.add_done_callback(self._pulse_ended)
        try:
            await self._stopping.wait()
        finally:
            close()
            pulse.cancel()
            learning.cancel()
            await self._drain()

    async def _drain(self) -> None:
        begun = time.monotonic()

        def left(phase: float) -> float:
            return max(0.0, begun + phase - time.monotonic())

        await self._services.connections.end(left(_TAKEN_IN), self._beat)
        await self._services.claims.acquisition.uploaded(left(_UPLOADED))
        within = left(_WRITTEN)
        await _finish(
            [
                self._services.claims.acquisition.drain(within, _GIVEN_BACK - _WRITTEN),
                self._services.chores.drain(within),
            ],
            left(_GIVEN_BACK),
        )
        self._services.tiers.close()
        await _finish([self._leases.close()], left(_CLOSED))

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(self._beat)
            self._services.claims.tick()
            self._services.connections.beat()
            self._services.chores.pulse()
            self._services.pools.tick()
            self._show()
            if self._services.connections or self._services.claims.acquisition.busy:
                self._last_used = time.monotonic()
            elif self._daemon and time.monotonic() - self._last_used > self._settings.idle_timeout:
                self.stop()

    def _pulse_ended(self, pulse: asyncio.Task[None]) -> None:
        """End the agent, so that ranks start another one: without a pulse they would take it for dead, slowly."""
        if tell_if_failed(pulse, "the agent ends", self._notices.tell):
            self.stop()

    def _show(self) -> None:
        """Copy the state for threads that serve it over HTTP."""
        if self._metrics is not None:
            self._metrics.look(self.id, self._settings.namespace, self._services, self._leases, self._notices)
        if self._page is not None:
            self._page.look(self.status())

    async def _learn(self) -> None:
        """Take the compile times and the choices that the job's profile recorded."""
        if self._settings.recorded_as is not None:
            self._services.take_in(await self._services.profiles.recorded(self._settings.recorded_as))

    def _gone(self, connection: Connection) -> None:
        self._last_used = time.monotonic()
        self._services.gone(connection)
        if self._launchers.gone(connection.id):
            self.stop()

    def _stop(self, connection: Connection, _: int, message: messages.Stop) -> messages.Answer:
        self.stop()
        return messages.Done()

    def _attend(self, connection: Connection, _: int, message: messages.Attend) -> messages.Answer:
        self._services.connections.must_live(connection)
        self._launchers.attend(connection.id, message.job)
        return messages.Done()

    def _leave(self, connection: Connection, _: int, message: messages.Leave) -> messages.Answer:
        last, last_of_job = self._launchers.leaves(connection.id)
        return messages.Left(last, last_of_job, ends=os.getpid() if last and self.handed_over else 0)

    def _hand_over(self, connection: Connection, _: int, message: messages.HandOver) -> messages.Answer:
        last_of_job = self._settings.job not in self._launchers.staying()
        return messages.Left(not self.hand_over(), last_of_job, ends=0)


class Launchers:
    """The launchers that keep an agent alive: its owner, which started it for `job` (if it is `owned`), and others of the node,
    which attend.

    One `kcoord exec` for each task of a node (``srun --ntasks-per-node=8 kcoord exec -- …``) is the usual case: the first one
    starts the agent, and may well be the first to end. The agent ends with the last of them. Not guaranteed: that the successor
    of a killed agent knows of the others.
    """

    def __init__(self, owned: bool, job: str | None) -> None:
        self._owner_is_here, self._ownerless, self._job = owned, not owned, job
        self._others: dict[int, str | None] = {}  # launchers that attend: connection → job
        self._leaving: set[int] = set()  # those among them that are ending

    @property
    def handed_over(self) -> bool:
        """True once the owner has left the agent to others."""
        return not (self._ownerless or self._owner_is_here)

    def attend(self, connection: int, job: str | None) -> None:
        self._others[connection] = job

    def leaves(self, connection: int) -> tuple[bool, bool]:
        """The launcher with this `connection` ends. Is it the last one, and the last one of its job? Of several that end at once,
        one is.
        """
        if connection in self._others:
            self._leaving.add(connection)
        staying = [*self.staying(), *([self._job] if self._owner_is_here else [])]
        return not staying, self._others.get(connection, self._job) not in staying

    def staying(self) -> list[str | None]:
        """The jobs of the launchers that attend and do not end."""
        return [job for connection, job in self._others.items() if connection not in self._leaving]

    def owner_leaves(self) -> bool:
        """The owner ends, or has ended. True: the agent goes on for others. False: there are none, or they end, too."""
        stays = bool(self.staying())
        if stays:
            self._owner_is_here = False
        return stays

    def gone(self, connection: int) -> bool:
        """True if the owner and all others have gone now: the agent ends. Never of an agent that has no owner."""
        if connection not in self._others:
            return False
        del self._others[connection]
        self._leaving.discard(connection)
        return self.handed_over and not self._others


async def _finish(drains: list[Coroutine[Any, Any, None]], seconds: float) -> None:
    """Run `drains` side by side. After `seconds` those that are left are given up, so that none keeps the next phase waiting."""
    tasks = [asyncio.ensure_future(drain) for drain in drains]
    done, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    for task in done:
        tell_if_failed(task, "the agent ends all the same")
