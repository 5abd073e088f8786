"""The agent: one asyncio process per node. This file has its parts, the table of requests, the pulse and the end.

The way of a claim: `connections` parses it, `claims` enters it into the `flights`, `lease_tasks` carries out the actions on
leases and artifacts, `claims` answers. Other requests go to `choices`, to `launchers`, and to the chores.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import platform
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import TYPE_CHECKING, Any

import kcoord
from kcoord.agent.actions import Action
from kcoord.agent.choices import Choices
from kcoord.agent.chores.chore import Chores
from kcoord.agent.chores.deliveries import Deliveries
from kcoord.agent.chores.late_publishes import LatePublishes
from kcoord.agent.chores.local_retention import LocalRetention
from kcoord.agent.chores.packing import PackWriter
from kcoord.agent.chores.profiles import Profiles
from kcoord.agent.chores.requested import RequestedRecorder
from kcoord.agent.chores.statistics import Share, Statistics
from kcoord.agent.chores.store_retention import StoreRetention
from kcoord.agent.chores.sweeping import Sweeper
from kcoord.agent.chores.timelines import Timelines
from kcoord.agent.chores.use_notes import UseNotes
from kcoord.agent.claims import Claims
from kcoord.agent.cold_starts import ColdStarts
from kcoord.agent.connections import Connection, Connections, Observer
from kcoord.agent.expectations import Expectations
from kcoord.agent.flights import Flights
from kcoord.agent.launchers import Launchers
from kcoord.agent.lease_tasks import LeaseTasks
from kcoord.agent.measurements import SharedMeasurements
from kcoord.agent.metrics.observed import vitals
from kcoord.agent.pools import Pools, of_worker
from kcoord.agent.watch.signing_keys import SigningKeyWatch
from kcoord.agent.watch.stalls import StallWatch
from kcoord.artifacts.choices import store_decided
from kcoord.artifacts.signing import OFF
from kcoord.artifacts.store import Store
from kcoord.leases.base import LeaseService
from kcoord.profiles.automatic import is_automatic
from kcoord.profiles.recipe import Recipe
from kcoord.protocol import messages
from kcoord.protocol.endpoint import log_to_file
from kcoord.protocol.fields import HEARTBEAT
from kcoord.settings import Settings, is_profile_name
from kcoord.telemetry import json_log
from kcoord.telemetry.events import Notices, tell_if_failed
from kcoord.telemetry.ledger import Ledger

if TYPE_CHECKING:
    from kcoord.agent.metrics.exporter import Exporter
    from kcoord.agent.page.status_page import StatusPage

ENDS_WITHIN = 18.0
"""Seconds in which a stopped agent ends, whatever hangs: a launcher kills it after 20, Slurm and Kubernetes after 30."""
_JOBS_SHOWN = 8  # the latest
_LEARNS_WITHIN = 1.0  # seconds; the first rank may ask for a choice that the profile recorded
# The ends of the drain's phases, in seconds from its beginning.
_TAKEN_IN = 6.0  # publishes that this node's ranks have handed in are in the local tier
_UPLOADED = 8.0  # they are in the store, so that a pack can have them
_WRITTEN = 10.0  # what took longer is there, too; profiles, packs, time lines and statistics are written
_GIVEN_BACK = 15.0  # leases are released
_CLOSED = 17.0  # connections to the lease service are closed

_LOGGED = {"key": "digest", "backend": "backend", "name": "name"}
"""The fields of `kcoord.telemetry.json_log.about` that name a key: attributes of a request, or of its key."""

Handler = Callable[[Connection, int, Any], messages.Answer | Awaitable[messages.Answer] | None]
"""``handler(connection, request id, message)`` returns the answer, or an awaitable of it. None: it calls `Connections.answer`,
now or later. Raises `ProtocolError`, which ends the connection.
"""


class Agent:
    """Serves one listening socket until it is stopped, or, as a daemon, until it has been idle for long enough.

    `tells_clients`: its notices go to a node's first rank too, for an agent whose own log nobody reads. `owned`: a launcher
    started it, and it ends with the last launcher that it serves.
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
        page: StatusPage | None = None,
    ) -> None:
        self.id = f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._settings, self._leases, self._notices, self._daemon = settings, leases, notices, daemon
        self._exporter, self._page, self._store_root = exporter, page, store.root if store is not None else None
        self._observer = exporter.observer if exporter is not None else Observer()
        self._connections = Connections(
            self.id, notices, tells_clients, self._request, self._gone, self._observer,
            welcome=lambda who: who.expected.check(settings),
        )  # fmt: skip
        self._flights = Flights(limit=settings.lease_limit, failure_ttl=settings.failure_ttl)
        self._expectations = Expectations(settings.hedge, settings.hedge_after)
        self._late = LatePublishes(
            store, settings.local_dir, lambda: not self._tiers.store.faulty, notices
        )  # fmt: skip
        self._lease_tasks = LeaseTasks(
            leases, store, self._flights, notices,
            agent_id=self.id, ttl=settings.lease_ttl, now=time.monotonic, report=self._carry_out,
            local_dir=settings.local_dir, learn=self._expectations.learn, in_store=self._late.published,
            used=lambda pack: self._use_notes.used([pack], os.getpid()), profile=settings.recorded_as,
        )  # fmt: skip
        self._tiers = self._lease_tasks.tiers
        root, trust = (store.root, store.trust) if store is not None else (None, OFF)
        self._timelines = Timelines(root, settings.local_dir, self.id, notices)
        self._sweeper = Sweeper(root, settings.local_dir, notices)
        self._claims = Claims(
            self._connections, self._flights, self._lease_tasks, notices, settings.max_wait, self._timelines.lost,
            self._expectations, self._sweeper,
        )  # fmt: skip
        stalls = StallWatch(settings.stall, self._claims.compiling, self._claims.stalled, notices)
        self._choices = Choices(self._tiers, settings.local_dir, settings.agent_timeout, notices)
        self._measurements = SharedMeasurements()
        self._profiles = Profiles(root, settings.local_dir, notices, trust)
        self._statistics = Statistics(Ledger(settings.local_dir, self.id), self.id, notices, share)
        named = None if is_automatic(settings.profile) else settings.recorded_as
        self._requested = RequestedRecorder(root, settings.local_dir, named, notices)
        packing = PackWriter(
            store, settings.recorded_as, self._tiers.packs, self._lease_tasks.early_packs, leases, self.id,
            settings.lease_ttl, notices,
        )  # fmt: skip
        self._use_notes = UseNotes(root, notices)
        in_store = StoreRetention(root, settings, leases, self.id, notices, trust)
        on_node = LocalRetention(settings.local_dir, settings.local_max_size, root, notices)
        keys = SigningKeyWatch(trust, settings.signing_key_file if store else None, notices)
        parts = (stalls, self._statistics, self._profiles, self._requested, packing, self._timelines, self._sweeper,
                 self._use_notes, in_store, on_node, keys, self._late)  # fmt: skip
        self._chores = Chores(*(part.chores for part in parts))
        self._pools = Pools(
            settings.ahead,
            self._connections,
            self._profiles,
            self._take_in,
            self._statistics.add,
            notices,
        )
        self._cold_starts = ColdStarts()
        self._deliveries = Deliveries()
        self._vitals = functools.partial(
            vitals, self.id, settings.namespace, self._connections, self._flights, self._claims, self._lease_tasks, leases,
            notices, lambda: in_store.gauges() | on_node.gauges(), has_store=store is not None,
        )  # fmt: skip
        self._started, self._last_used = time.time(), time.monotonic()
        self._stopping = asyncio.Event()
        self.launchers = Launchers(owned, self.stop)
        # a claim that waits hears from us well within the time after which it takes us for dead
        self._beat = min(HEARTBEAT, settings.agent_timeout / 3)
        self._handlers: dict[type[messages.Request], Handler] = {
            messages.Claim: self._claim,
            messages.Publish: self._publish,
            messages.Fail: self._claims.fail,
            messages.GiveUp: self._claims.give_up,
            messages.Lookup: self._lookup,
            messages.Offer: lambda connection, _, message: self._choices.offer(connection.who, message),
            messages.Measure: lambda connection, _, message: self._measurements.answer(
                (connection.pid, connection.who.pid), message
            ),
            messages.Record: self._record,
            messages.Deliver: self._deliver,
            messages.Profile: lambda _, __, message: self._profiles.bring(message.profile, settings.agent_timeout / 2),
            messages.Announce: self._announce,
            messages.Join: self._pools.join,
            messages.Take: self._pools.take,
            messages.Status: lambda _, __, ___: messages.Facts(self.status()),
            messages.Stats: self._stats,
            messages.Stop: self._stop,
            messages.Attend: self._attend,
            messages.Leave: self._leave,
            messages.HandOver: lambda _, __, ___: messages.Left(last=not self.hand_over(), ends=0),
        }
        self._note_vitals()

    def stop(self) -> None:
        self._stopping.set()

    async def stopped(self) -> None:
        """Return once `stop` was called."""
        await self._stopping.wait()

    def hand_over(self) -> bool:
        """The owner ends. True: the agent goes on for other launchers."""
        stays = self.launchers.owner_leaves()
        if stays:
            log_to_file(self._settings.socket_path)
            self._connections.tells_clients = True
        return stays

    def status(self) -> dict[str, Any]:
        """The agent, its settings and its flights, as ``kcoord status --json`` prints them."""
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
            "uploads": self._lease_tasks.uploads,
            "leases": self._lease_tasks.held,
            "store": None
            if self._store_root is None
            else {
                "root": str(self._store_root),
                "usable": not self._tiers.store.faulty,
            },
            "jobs": self._statistics.latest(_JOBS_SHOWN),
            "packs": self._tiers.packs.status(),
            "pools": self._pools.status(),
            "hedges": self._claims.hedged,
            "stalls": self._claims.stalled_ones,
            "metrics": self._exporter.bound if self._exporter is not None else None,
            "page": self._page.bound if self._page is not None else None,
        }

    # The life of an agent.

    async def serve(self, listener: socket.socket) -> None:
        """Serve until stopped; then drain: finish publishes, release leases. The listener is closed."""
        if self._page is not None:
            self._page.begin(self.status)
        if self._settings.recorded_as is not None:
            self._tiers.packs.begin(self._settings.recorded_as)
        learning = asyncio.create_task(self._learn())
        await asyncio.wait({learning}, timeout=_LEARNS_WITHIN)
        server = await self._connections.listen(listener)
        pulse = asyncio.create_task(self._pulse())
        pulse.add_done_callback(self._pulse_ended)
        try:
            await self._stopping.wait()
        finally:
            server.close()
            pulse.cancel()
            learning.cancel()
            await self._drain()

    async def _drain(self) -> None:
        begun = time.monotonic()

        def left(phase: float) -> float:
            return max(0.0, begun + phase - time.monotonic())

        await self._connections.end(left(_TAKEN_IN), self._beat)
        await self._lease_tasks.uploaded(left(_UPLOADED))
        within = left(_WRITTEN)
        await _finish(
            [self._lease_tasks.drain(within, _GIVEN_BACK - _WRITTEN), self._chores.drain(within)], left(_GIVEN_BACK)
        )
        await _finish([self._leases.close()], left(_CLOSED))

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(self._beat)
            self._claims.tick()
            self._connections.beat()
            self._chores.pulse()
            self._pools.tick()
            self._note_vitals()
            if self._connections or self._lease_tasks.busy:
                self._last_used = time.monotonic()
            elif self._daemon and time.monotonic() - self._last_used > self._settings.idle_timeout:
                self.stop()

    def _pulse_ended(self, pulse: asyncio.Task[None]) -> None:
        """An agent without a pulse is taken for dead, slowly: better it ends, and the next one is started."""
        if tell_if_failed(pulse, "the agent ends", self._notices.tell):
            self.stop()

    def _note_vitals(self) -> None:
        if self._exporter is not None:
            self._exporter.vitals = self._vitals()

    async def _learn(self) -> None:
        """Take the compile times and the choices that the job's profile recorded."""
        if self._settings.recorded_as is not None:
            self._take_in(await self._profiles.recorded(self._settings.recorded_as))

    def _take_in(self, recipes: Collection[Recipe]) -> None:
        self._expectations.learn_all(recipes)
        self._choices.learn(recipes)

    # Requests.

    def _request(self, connection: Connection, request: int, message: messages.Request) -> None:
        about: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._settings.log_format == "json":
            who, key = connection.who, getattr(message, "key", message)
            named = {field: getattr(key, attribute, None) for field, attribute in _LOGGED.items()}
            about = json_log.about(job=who.job, rank=who.rank, pid=who.pid, **named)
        with about:
            answer = self._handlers[type(message)](connection, request, message)
            if isinstance(answer, messages.Answer):
                self._connections.answer(connection, request, answer)
            elif answer is not None:
                self._connections.answer_later(connection, request, answer)

    def _carry_out(self, actions: list[Action]) -> None:
        self._claims.carry_out(actions)

    def _gone(self, connection: Connection) -> None:
        self._last_used = time.monotonic()
        self._pools.gone(connection.id)
        self.launchers.gone(connection.id)
        self._claims.gone(connection)
        if not self._connections:  # the user's next command finds what the last one recorded
            for chore in (*self._profiles.chores, *self._requested.chores):
                chore.hasten()

    def _claim(self, connection: Connection, request: int, message: messages.Claim) -> None:
        ahead = self._pools.compiling(connection)
        self._claims.claim(connection, request, message, ahead)
        self._pools.asked(connection, message.recipe)
        self._requested.note(message.digest, str(message.home))
        self._use_notes.used([message.digest], connection.pid)

    def _announce(self, connection: Connection, request: int, message: messages.Announce) -> Awaitable[messages.Answer]:
        if message.profile is not None and is_profile_name(message.profile):
            self._tiers.packs.begin(message.profile)
        return self._pools.announce(connection, request, message)

    def _publish(self, connection: Connection, request: int, message: messages.Publish) -> Awaitable[messages.Answer]:
        self._pools.published(connection, message.key, message.compile_seconds)
        return self._claims.publish(connection, request, message)

    def _lookup(self, connection: Connection, _: int, message: messages.Lookup) -> Awaitable[messages.Answer]:
        self._requested.note(message.digest, str(store_decided(self._settings.local_dir, message.digest)))
        self._use_notes.used([message.digest], connection.pid)
        return self._choices.lookup(message)

    def _record(self, connection: Connection, _: int, message: messages.Record) -> messages.Answer:
        self._profiles.add(message.profile, message.recipes)
        return messages.Done()

    def _deliver(self, connection: Connection, _: int, message: messages.Deliver) -> messages.Answer:
        if not self._deliveries.new(message):
            message = dataclasses.replace(message, counters={}, spans=[], dropped=0)
        if connection.who.pool:
            message = of_worker(message)
        self._observer.counted(message.counters)
        self._statistics.add(connection.who.job, message.counters)
        spans = self._timelines.add(connection.who, message)
        used = [span.key for span in spans]
        if not connection.who.pool:
            self._cold_starts.add(connection.who, spans)
            self._pools.used(connection.who.job, used)
        self._use_notes.used(used, connection.pid)
        self._late.used(span.key for span in spans if span.kind == "load")
        return messages.Done()

    async def _stats(self, connection: Connection, _: int, message: messages.Stats) -> messages.Answer:
        cold = self._cold_starts.of(message.job)
        return messages.Facts(await self._statistics.answer(message.job) | ({"cold_start": cold} if cold else {}))

    def _stop(self, connection: Connection, _: int, message: messages.Stop) -> messages.Answer:
        self.stop()
        return messages.Done()

    def _attend(self, connection: Connection, _: int, message: messages.Attend) -> messages.Answer:
        self._connections.must_live(connection)
        self.launchers.attend(connection.id)
        return messages.Done()

    def _leave(self, connection: Connection, _: int, message: messages.Leave) -> messages.Answer:
        last = self.launchers.leaves(connection.id)
        return messages.Left(last, ends=os.getpid() if last and self.launchers.handed_over else 0)


async def _finish(drains: list[Coroutine[Any, Any, None]], seconds: float) -> None:
    """Run `drains` side by side. After `seconds` those that are left are given up, so that none keeps the next phase waiting."""
    tasks = [asyncio.ensure_future(drain) for drain in drains]
    done, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    for task in done:
        tell_if_failed(task, "the agent ends all the same")
