"""Answers claims: passes events of clients to the flights, which decide, and carries out the actions that follow."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kcoord.agent import flights as act
from kcoord.agent.acquisition import Acquisition
from kcoord.agent.chores.chore import Chore, DiskThread
from kcoord.agent.chores.timelines import Timelines
from kcoord.agent.connections import Connection, Connections
from kcoord.agent.expectations import Expectations
from kcoord.agent.flights import Flights
from kcoord.agent.late_compiles import Compile, LateCompiles
from kcoord.agent.tiers import Tiers
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.manifest import Origin
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.latest import Latest
from kcoord.leases.base import LeaseService
from kcoord.packs.recipe import Recipe
from kcoord.protocol import messages
from kcoord.settings import Settings
from kcoord.stalls import Stalls
from kcoord.telemetry.events import Notices
from kcoord.telemetry.spans import plain_text

_NAMES_REMEMBERED = 20_000
_UNKNOWN = "?:?"
_STARVED = 30.0  # seconds


class Claims:
    """Answers `Claim`, `Publish`, `Fail` and `GiveUp`. A claim's deadline is after `max_wait` seconds."""

    def __init__(
        self,
        settings: Settings,
        agent_id: str,
        connections: Connections,
        leases: LeaseService,
        tiers: Tiers,
        notices: Notices,
        *,
        expectations: Expectations,
        timelines: Timelines,
    ) -> None:
        self._connections, self._leases, self._tiers, self._notices = connections, leases, tiers, notices
        self._max_wait, self._expectations, self._timelines = settings.max_wait, expectations, timelines
        self.flights = Flights(limit=settings.lease_limit, failure_ttl=settings.failure_ttl, max_wait=settings.max_wait)
        self.acquisition = Acquisition(
            leases, tiers, self.flights, notices,
            agent_id=agent_id, ttl=settings.lease_ttl, now=time.monotonic, report=self.carry_out,
        )  # fmt: skip
        self._waiting: dict[int, tuple[Connection, int]] = {}  # claim → its client and its request's id
        self._names: Latest[str, str] = Latest(_NAMES_REMEMBERED)  # key → backend and kernel name, for people
        self.hedged, self.stalled = 0, 0
        self._late_compiles = LateCompiles()
        self._stalls: Stalls[tuple[str, str]] = Stalls(settings.stall_seconds)
        self._stalls_thread = DiskThread("stalls")
        self.chores: list[Chore] = []
        if settings.stall_seconds:
            every = min(settings.stall_seconds, settings.max_wait) / 4
            self.chores.append(Chore("stalls", self._stalls_thread, self._look_for_stalls, notices, every=every))

    def claim(self, connection: Connection, request: int, message: messages.Claim, ahead: Recipe | None = None) -> None:
        """Begin a claim. `_reply` answers it, now or later. `ahead`: a pool's worker makes it, to compile this recipe."""
        self._connections.must_live(connection)
        home = str(message.home)
        self._names[message.digest] = message.label
        if message.passing:
            self.acquisition.passing[home] = None
        now, who = time.monotonic(), connection.label
        claimant = act.Claimant(
            next(self._connections.ids), connection.id, message.digest, home, who, now + self._max_wait, message.wait,
            functools.partial(self._slow_after, random.uniform(1.0, 2.0), message.digest,
                              message.recipe if ahead is None else ahead.digest, ahead),
        )  # fmt: skip
        self._waiting[claimant.id] = connection, request
        self.carry_out(self.flights.claim(claimant, now))

    def publish(self, connection: Connection, request: int, message: messages.Publish) -> Awaitable[messages.Answer]:
        key, took = message.key, message.compile_seconds
        self._expectations.learn(key.digest, took)
        token = (
            message.token if self.flights.landing(key.digest, message.token) else ""
        )  # empty: no flight waits for it
        origin = Origin.here(connection.who.pid, connection.who.rank, message.device)
        publish = functools.partial(self._tiers.publish_locally, message.staging, message.home, key, took, origin)
        return self._land(connection, key.digest, token, publish)

    def fail(self, connection: Connection, request: int, message: messages.Fail) -> messages.Answer:
        where = connection.label
        self.carry_out(self.flights.failed(message.digest, message.token, message.log, where, time.monotonic()))
        return messages.Done()

    def give_up(self, connection: Connection, request: int, message: messages.GiveUp) -> messages.Answer:
        now = time.monotonic()
        if message.why:
            why = f"{connection.label} compiled it, but could not share it: {message.why}"
            self.carry_out(self.flights.not_published(message.digest, message.token, why, now))
        else:
            self.carry_out(self.flights.given_up(message.digest, message.token, now))
        return messages.Done()

    def gone(self, connection: Connection) -> None:
        """A client has ended: its claims are void, and another leader takes over what it led."""
        for claim in [claim for claim, (client, _) in self._waiting.items() if client is connection]:
            del self._waiting[claim]
        now = time.monotonic()
        for flight in self.flights:
            leader = flight.leader
            if leader is not None and leader.claimant.owner == connection.id and not leader.lands:
                name = self._names.get(flight.key, _UNKNOWN)
                self._timelines.lost(connection.who, flight.key, name, now - leader.since)
        self.carry_out(self.flights.gone(connection.id, now))

    def tick(self) -> None:
        """End the waits that are over their bounds, and tell of late compiles. Call it about once a second."""
        for line in self._late_compiles.look(self._compiles(), self._timelines.last_ready, time.time()):
            self._notices.tell(line, passing=True)
        actions = self.flights.tick(time.monotonic(), may_hedge=self._leases.settled)
        for action in actions:
            if isinstance(action, act.Reply) and isinstance(action.answer, messages.Alone):
                name = self._names.get(action.claimant.key, _UNKNOWN)
                self._notices.tell(f"ranks {action.answer.why} for {name}: each compiles it for itself", passing=True)
        self.carry_out(actions)

    def carry_out(self, actions: list[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Reply):
                self._reply(action)
            else:
                self.acquisition.start(action)

    def status(self) -> list[dict[str, Any]]:
        """The flights, for people."""
        now = time.monotonic()
        return [
            {
                "key": f.key,
                "name": self._names.get(f.key, "?"),
                "state": "waiting for another node" if f.remote else f.state.value,
                "leader": f.leader.claimant.who if f.leader else f.remote,
                "seconds": round(now - (f.leader.since if f.leader else f.since), 3),
                "waiting": [w.who for w in f.waiters.values()],
            }
            for f in self.flights
        ]

    def _compiles(self) -> Iterator[Compile]:
        """The compiles of this node's ranks, since when in Unix seconds."""
        epoch = time.time() - time.monotonic()
        for flight in self.flights:
            if flight.leader is not None and not flight.leader.lands:
                connection = self._connections.of(flight.leader.claimant.owner)
                if connection is not None and not connection.who.pool:
                    name = self._names.get(flight.key, _UNKNOWN)
                    yield connection.who.job, connection.label, name, epoch + flight.leader.since

    async def _look_for_stalls(self) -> None:
        """Find compilers that hang, and those that work. One that spins looks busy, until a hedge, or its lease's limit."""
        processes = {
            (flight.key, attempt.token): self._connections.process_of(attempt.claimant.owner)
            for flight in self.flights
            for attempt in flight.attempts()
            if not attempt.lands
        }
        seen = {compile: directory for compile, directory in processes.items() if directory}
        for key, token in await self._stalls_thread.run(lambda: self._stalls.look(seen, time.monotonic())):
            if actions := self.flights.stalled(key, token, time.monotonic()):
                self.stalled += 1
                name = self._names.get(key, _UNKNOWN)
                self._notices.tell(
                    f"a compile of {name} has not used the CPU for KCOORD_STALL_SECONDS seconds: another rank may go ahead",
                    passing=True,
                )
                self.carry_out(actions)
        for key, token in self._stalls.working:
            self.flights.works(key, token)

    def _tell_late(self, reply: act.Reply) -> None:
        name = self._names.get(reply.claimant.key, _UNKNOWN)
        others = ", and this node waits for none of its other compiles" if reply.late in self.flights.overdue else ""
        late = plain_text(reply.late) or "the store, or the lease service,"
        self._notices.tell(
            f"{late} takes long with {name}: {reply.claimant.who} compiles it, too{others}",
            about=f"late: {late}{others}",
            passing=True,
        )

    def _slow_after(self, drawn: float, digest: str, recipe: str | None, ahead: Recipe | None) -> float:
        """Seconds after which a compile is slow. `drawn` at random, so that nodes that wait for one leader differ.

        A worker has a low priority, and may get no core for long: then a rank that waits for it compiles, too.
        """
        known = drawn * self._expectations.slow_after(digest, recipe)
        return known if ahead is None else min(known, _STARVED)

    async def _land(
        self, connection: Connection, digest: str, token: str, publish: Callable[[], Awaitable[Artifact]]
    ) -> messages.Answer:
        why = "an error in the agent; its log has it"
        try:
            artifact = await publish()
            why = ""
        except (ArtifactInvalid, StoreError) as error:
            why = str(error)
            about = f"the local directory: {error.remedy}" if isinstance(error, StoreError) else None
            self._notices.tell(f"not published: {why}", about=about, passing=about is None)
            return messages.Refused(why)
        finally:
            if why and token:  # whatever went wrong: let the waiters of this flight go
                why = f"{connection.label} compiled it, but could not publish it: {why}"
                self.carry_out(self.flights.not_published(digest, token, why, time.monotonic()))
        self._landed(digest, str(artifact.path))
        return messages.Done()

    def _landed(self, digest: str, home: str) -> None:
        """End the flight. An artifact in a directory that its rank throws away stays on this node: a tuner uses one of many."""
        for action in self.flights.landed(digest, home):
            if isinstance(action, act.Upload) and home in self.acquisition.passing:
                action = act.EndLease(action.key, action.serial)
                self._tiers.stays_here(digest)
            self.carry_out([action])

    def _reply(self, reply: act.Reply) -> None:
        claimant, answer = reply.claimant, reply.answer
        connection, request = self._waiting.get(claimant.id, (None, 0))
        if connection is None:
            if isinstance(answer, messages.Lead):  # the client left in this very moment: somebody else leads
                self.carry_out(self.flights.gone(claimant.owner, time.monotonic()))
        elif isinstance(answer, messages.Ready) and (reply.remembered or reply.home != claimant.home):
            self._connections.begin(connection, self._copy_then_reply(reply))
        else:
            del self._waiting[claimant.id]
            if isinstance(answer, messages.Lead) and answer.hedges:
                self.hedged += 1
                self._tell_late(reply)
            self._connections.answer(connection, request, answer)

    async def _copy_then_reply(self, reply: act.Reply) -> None:
        """Copy the artifact to the claimant's home from another one, or make sure that it is still there."""
        claimant = reply.claimant
        done = await self._tiers.bring_home(claimant.key, Path(reply.home), Path(claimant.home))
        if done is None and not claimant.again and claimant.id in self._waiting:
            # the other waiters for a copy ask too, and one of them leads
            self.carry_out(self.flights.claim(replace(claimant, again=True), time.monotonic()))
        elif done:
            self._reply(replace(reply, home=claimant.home, remembered=False))
            passing = self.acquisition.passing
            if reply.home in passing and claimant.home not in passing:  # it is used
                self._landed(claimant.key, claimant.home)
        else:
            why = f"it cannot be copied to {claimant.home}"
            self._reply(act.Reply(claimant, messages.Alone(why)))
