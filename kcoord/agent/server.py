"""The agent: one asyncio process per node. This is its front door: what there is to ask, who answers it, and how it ends.

`connections` knows the clients, `claims` who compiles what; `errands` alone goes to Redis and to artifacts on disk. `choices`,
`profiles`, `timelines`, `statistics` and `permits` answer the rest.
"""

from __future__ import annotations

import asyncio
import functools
import os
import platform
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

import kcoord
from kcoord.agent.actions import Action
from kcoord.agent.choices import Choices
from kcoord.agent.chores.delivered import Reports, emptied
from kcoord.agent.chores.profiles import Profiles
from kcoord.agent.chores.requested import Needs
from kcoord.agent.chores.retention import Keeper
from kcoord.agent.chores.statistics import Share, Statistics
from kcoord.agent.chores.sweeping import Sweeper
from kcoord.agent.chores.timelines import Timelines
from kcoord.agent.claims import Claims
from kcoord.agent.connections import Connection, Connections
from kcoord.agent.expectations import Expectations
from kcoord.agent.flights import Flights
from kcoord.agent.launchers import Launchers
from kcoord.agent.lease_tasks import LeaseTasks
from kcoord.agent.log_context import subject
from kcoord.agent.metrics.observed import MeteredConnections, vitals
from kcoord.agent.watch.idle_cores import Permits
from kcoord.agent.watch.signing_keys import KeyWatch
from kcoord.agent.watch.stalls import StallWatch
from kcoord.artifacts.choices import store_decided
from kcoord.artifacts.signing import OFF
from kcoord.artifacts.store import Store
from kcoord.errors import ProtocolError
from kcoord.leases.base import LeaseService
from kcoord.protocol.endpoint import (
    log_to_file,
)
from kcoord.protocol.fields import (
    HEARTBEAT,
    optional,
)
from kcoord.protocol.fields import (
    field as take,
)
from kcoord.settings import Settings
from kcoord.telemetry import json_log
from kcoord.telemetry.events import Notices, log
from kcoord.telemetry.ledger import Ledger

if TYPE_CHECKING:
    from kcoord.agent.metrics.exporter import Exporter

ENDS_WITHIN = 18.0
"""Seconds in which an agent ends that is told to, whatever hangs: a launcher kills it after 20, Slurm and Kubernetes after 30."""
# Of these: until when the kernels of this node's ranks are taken in; until when they are put into the store, and profiles, time
# lines and statistics written; until when leases are given back; and until when connections are closed.
_TAKEN_IN, _WRITTEN, _GIVEN_BACK, _CLOSED = 6.0, 10.0, 15.0, 17.0

Handler = Callable[[Connection, int, dict[str, Any]], None]
"""``handler(connection, request id, message)``: sends the answer, now or later. Raises `ProtocolError`."""


class Agent:
    """Serves one listening socket until it is stopped, or, as a daemon, until it has been idle for long enough.

    `tells_clients`: its notices go to a node's first rank too, for an agent whose own log nobody looks at. `owned`: a launcher
    started it, and it ends with that one and the others that it serves.
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
        share: Share | None = None,
        owned: bool = False,
        exporter: Exporter | None = None,
    ) -> None:
        self.id = f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._settings, self._leases, self._notices, self._daemon = settings, leases, notices, daemon
        connections = functools.partial(MeteredConnections, exporter.tally) if exporter is not None else Connections
        self._connections = connections(self.id, notices, tells_clients, self._request, self._gone)
        flights = Flights(limit=settings.lease_limit, failure_ttl=settings.failure_ttl)
        self._expectations = Expectations(settings.hedge, settings.hedge_after)
        self._errands = LeaseTasks(
            leases, store, flights, notices,
            agent_id=self.id, ttl=settings.lease_ttl, now=time.monotonic, report=self._carry_out,
            learn=self._expectations.learn,
        )  # fmt: skip
        root = store.root if store else None
        self._timelines = Timelines(root, settings.local_dir, self.id, notices)
        self._sweeper = Sweeper(root, settings.local_dir)
        self._claims = Claims(
            self._connections, flights, self._errands, notices, settings.max_wait, self._timelines.lost,
            self._expectations, self._sweeper,
        )  # fmt: skip
        self._stalls = StallWatch(settings.stall, self._claims.compiling, self._claims.stalled, notices)
        self._choices = Choices(self._errands, settings.local_dir, settings.agent_timeout, notices)
        self._profiles = Profiles(root, settings.local_dir, notices, store.trust if store else OFF)
        self._statistics = Statistics(Ledger(settings.local_dir, self.id), self.id, notices, share)
        self._needs = Needs(root, settings.local_dir, settings.profile, notices)
        self._keeper = Keeper(root, settings, leases, self.id, notices, store.trust if store else OFF)
        self._key_watch = KeyWatch(store.trust if store else OFF, settings.signing_key_file if store else None, notices)
        self._permits, self._reports = Permits(settings.ahead), Reports()
        self._exporter, self._vitals = exporter, functools.partial(
            vitals, self.id, settings.namespace, self._connections, flights, self._claims, self._errands, leases, notices,
            self._keeper, has_store=store is not None,
        )  # fmt: skip
        self._note_vitals()
        self._started, self._last_used = time.time(), time.monotonic()
        self._stopping = asyncio.Event()
        self.launchers = Launchers(owned, self.stop)
        # a claim that waits hears from us well within the time after which it takes us for dead
        self._beat = min(HEARTBEAT, settings.agent_timeout / 3)
        self._answers: dict[str, Handler] = {
            "claim": self._claim,
            "publish": self._claims.publish,
            "fail": self._claims.fail,
            "give_up": self._claims.give_up,
            "lookup": self._lookup,
            "offer": self._offer,
            "record": self._record,
            "report": self._report,
            "profile": self._profile,
            "permit": self._permit,
            "status": self._status,
            "stats": self._stats,
            "stop": self._stop,
            "attend": self._attend,
            "leave": self._leave,
            "hand_over": self._hand_over,
        }

    def stop(self) -> None:
        self._stopping.set()

    async def told_to_stop(self) -> None:
        """Returns when it is."""
        await self._stopping.wait()

    def hand_over(self) -> bool:
        """Its owner ends. Whether there are other launchers to go on for."""
        stays = self.launchers.owner_leaves()
        if stays:
            log_to_file(self._settings.socket_path)
            self._connections.tells_clients = True
        return stays

    async def serve(self, listener: socket.socket) -> None:
        """Serve until stopped; then drain: finish publishes, release leases. The listener is closed."""
        server = await self._connections.listen(listener)
        pulse = asyncio.create_task(self._pulse())
        pulse.add_done_callback(self._pulse_ended)
        learning = asyncio.create_task(self._learn())
        try:
            await self._stopping.wait()
        finally:
            server.close()
            pulse.cancel()
            learning.cancel()
            await self._drain()

    async def _drain(self) -> None:
        begun = time.monotonic()

        def left(until: float) -> float:
            return max(0.0, begun + until - time.monotonic())

        await self._connections.end(left(_TAKEN_IN), self._beat)
        within = left(_WRITTEN)
        others = (self._profiles, self._timelines, self._needs, self._keeper, self._statistics)
        drains = [self._errands.drain(within, _GIVEN_BACK - _WRITTEN), *(part.drain(within) for part in others)]
        await self._finish(drains, left(_GIVEN_BACK))
        self._sweeper.close()
        self._key_watch.close()
        await self._finish([self._leases.close()], left(_CLOSED))

    async def _finish(self, drains: list[Coroutine[Any, Any, None]], seconds: float) -> None:
        """Run `drains` side by side. After `seconds` what is left of them is given up, and none keeps the next from its turn."""
        tasks = [asyncio.ensure_future(drain) for drain in drains]
        done, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        for task in done:
            if (error := task.exception()) is not None:
                log.error("an error in the agent as it ends, please report it", exc_info=error)

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(self._beat)
            self._claims.tick()
            self._stalls.pulse(time.monotonic())
            self._connections.beat()
            self._statistics.pulse()
            self._profiles.pulse()
            self._needs.pulse()
            self._timelines.pulse()
            self._sweeper.pulse()
            self._keeper.pulse()
            self._key_watch.pulse()
            self._permits.look()
            self._note_vitals()
            if self._connections or self._errands.busy:
                self._last_used = time.monotonic()
            elif self._daemon and time.monotonic() - self._last_used > self._settings.idle_timeout:
                self.stop()

    def _note_vitals(self) -> None:
        if self._exporter is not None:
            self._exporter.vitals = self._vitals()

    async def _learn(self) -> None:
        """What the job's profile says of its compiles."""
        if self._settings.profile is not None:
            self._expectations.learn_all(await self._profiles.recorded(self._settings.profile))

    def _pulse_ended(self, pulse: asyncio.Task[None]) -> None:
        """An agent without a pulse is taken for dead, slowly: better it ends, and the next one is started."""
        if not pulse.cancelled() and (error := pulse.exception()) is not None:
            self._notices.tell(f"an error in the agent, please report it: {type(error).__name__}: {error}")
            log.error("the agent ends", exc_info=error)
            self.stop()

    def _carry_out(self, actions: list[Action]) -> None:
        self._claims.carry_out(actions)

    def _gone(self, connection: Connection) -> None:
        self._last_used = time.monotonic()
        self._permits.gone(connection.id)
        self.launchers.gone(connection.id)
        self._claims.gone(connection)

    # Requests, and who answers them.

    def _request(self, connection: Connection, message: dict[str, Any]) -> None:
        request, op = take(message, "id", int), take(message, "op", str)
        if op not in self._answers:
            raise ProtocolError(f"there is no request {op[:80]!r}")
        if self._settings.log_format == "json":
            with json_log.about(**subject(connection.who, message)):
                self._answers[op](connection, request, message)
        else:
            self._answers[op](connection, request, message)

    def _claim(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        self._claims.claim(connection, request, message)
        self._needs.note(message["digest"], message["home"])
        self._keeper.used([message["digest"]], connection.pid)

    def _lookup(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        self._later(connection, request, self._choices.lookup(message))
        digest = message["digest"]
        self._needs.note(digest, str(store_decided(self._settings.local_dir, digest)))
        self._keeper.used([digest], connection.pid)

    def _offer(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        who = connection.who
        self._later(connection, request, self._choices.offer(message, who.pid, who.rank))

    def _record(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        self._profiles.add(take(message, "profile", str), take(message, "recipes", list))
        self._connections.send(connection, {"op": "done", "id": request})

    def _profile(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        answer = self._profiles.bring(take(message, "profile", str), self._settings.agent_timeout / 2)
        self._later(connection, request, answer)

    def _report(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        if not self._reports.new(message):
            emptied(message)  # here, and for the metrics
        self._statistics.add(connection.who.job, take(message, "counters", dict))
        self._keeper.used(self._timelines.add(connection.who, message), connection.pid)
        self._connections.send(connection, {"op": "done", "id": request})

    def _permit(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        self._connections.must_live(connection)
        granted = self._permits.ask(connection.id, take(message, "memory", int))
        self._connections.send(connection, {"op": "permit", "id": request, "granted": granted})

    def _status(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        self._connections.send(connection, {"op": "status", "id": request, **self.status()})

    def _stats(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        self._later(connection, request, self._statistics.answer(optional(message, "job", str)))

    def _stop(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        self._connections.send(connection, {"op": "done", "id": request})
        self.stop()

    def _attend(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        self._connections.must_live(connection)
        self.launchers.attend(connection.id)
        self._connections.send(connection, {"op": "done", "id": request})

    def _leave(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        last = self.launchers.leaves(connection.id)
        ends = os.getpid() if last and self.launchers.handed_over else 0
        self._connections.send(connection, {"op": "left", "id": request, "last": last, "ends": ends})

    def _hand_over(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        self._connections.send(connection, {"op": "done", "id": request, "stays": self.hand_over()})

    def _later(self, connection: Connection, request: int, answer: Awaitable[dict[str, Any]]) -> None:
        async def send() -> None:
            self._connections.send(connection, {"id": request, **await answer})

        self._connections.answer_later(connection, request, send())

    def status(self) -> dict[str, Any]:
        """What this agent is, and what is under way."""
        return {
            "agent": self.id,
            "pid": os.getpid(),
            "version": kcoord.__version__,
            "started": self._started,
            "coordinates": self._leases.name,
            "breaker": self._leases.breakers(),
            "clients": len(self._connections),
            "settings": self._settings.redacted(),
            "notices": self._notices.since(0)[0],
            "flights": self._claims.status(),
            "hedges": self._claims.hedged,
            "stalls": self._claims.stalled_ones,
            "metrics": self._exporter.bound if self._exporter is not None else None,
        }
