"""Claims: between the clients, the flights (who leads, who waits) and the tasks with leases and artifacts."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kcoord.agent import actions as act
from kcoord.agent.chores.sweeping import Sweeper
from kcoord.agent.connections import Connection, Connections
from kcoord.agent.expectations import Expectations
from kcoord.agent.flights import Flights
from kcoord.agent.lease_tasks import LeaseTasks
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.manifest import Origin
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.latest import Latest
from kcoord.packs.recipe import Recipe
from kcoord.protocol import messages
from kcoord.protocol.identity import Identity
from kcoord.telemetry.events import Notices
from kcoord.telemetry.spans import plain_text

_NAMES_REMEMBERED = 20_000
_UNKNOWN = "?:?"
_STARVED = 30.0  # seconds

Lost = Callable[[Identity, str, str, float], None]
"""``lost(who, digest, name, seconds)``: the process `who` ended after it had compiled ``backend:kernel`` for so long."""


class Claims:
    """Answers `Claim`, `Publish`, `Fail` and `GiveUp`. A claim's deadline is after `max_wait` seconds."""

    def __init__(
        self,
        connections: Connections,
        flights: Flights,
        lease_tasks: LeaseTasks,
        notices: Notices,
        max_wait: float,
        lost: Lost,
        expectations: Expectations,
        sweeper: Sweeper,
    ) -> None:
        self._connections, self._flights, self._lease_tasks, self._notices = connections, flights, lease_tasks, notices
        self._max_wait, self._lost, self._expectations, self._sweeper = max_wait, lost, expectations, sweeper
        self._waiting: dict[int, tuple[Connection, int]] = {}  # claim → its client and its request's id
        self._names: Latest[str, str] = Latest(_NAMES_REMEMBERED)  # key → backend and kernel name, for people
        self.hedged, self.stalled_ones = 0, 0

    def claim(self, connection: Connection, request: int, message: messages.Claim, ahead: Recipe | None = None) -> None:
        """Begin a claim. `_reply` answers it, now or later. `ahead`: a pool's worker makes it, to compile this recipe."""
        self._connections.must_live(connection)
        home = str(message.home)
        self._names[message.digest] = message.label
        self._sweeper.seen(home)
        if message.passing:
            self._lease_tasks.passing[home] = None
        now, who = time.monotonic(), connection.label
        claimant = act.Claimant(
            self._connections.new_id(), connection.id, message.digest, home, who, now + self._max_wait, message.wait,
            functools.partial(self._slow_after, message.digest, message.recipe if ahead is None else ahead.digest, ahead),
            message.missed,
        )  # fmt: skip
        self._waiting[claimant.id] = connection, request
        self.carry_out(self._flights.claim(claimant, now))

    def publish(self, connection: Connection, request: int, message: messages.Publish) -> Awaitable[messages.Answer]:
        key, took = message.key, message.compile_seconds
        self._expectations.learn(key.digest, took)
        token = message.token if self._flights.landing(key.digest, message.token) else ""  # else nobody waits for it
        origin = Origin.here(connection.who.pid, connection.who.rank, message.device)
        publish = functools.partial(
            self._lease_tasks.tiers.publish_locally, message.staging, message.home, key, took, origin
        )
        return self._land(connection, key.digest, token, self._sweeper.sparing(message.staging, publish))

    def fail(self, connection: Connection, request: int, message: messages.Fail) -> messages.Answer:
        where = connection.label
        self.carry_out(self._flights.failed(message.digest, message.token, message.log, where, time.monotonic()))
        return messages.Done()

    def give_up(self, connection: Connection, request: int, message: messages.GiveUp) -> messages.Answer:
        now = time.monotonic()
        if message.why:
            why = f"{connection.label} compiled it, but could not share it: {message.why}"
            self.carry_out(self._flights.not_published(message.digest, message.token, why, now))
        else:
            self.carry_out(self._flights.given_up(message.digest, message.token, now))
        return messages.Done()

    def gone(self, connection: Connection) -> None:
        """A client has ended: its claims are void, and another leader takes over what it led."""
        for claim in [claim for claim, (client, _) in self._waiting.items() if client is connection]:
            del self._waiting[claim]
        now = time.monotonic()
        for flight in self._flights:
            leader = flight.leader
            if leader is not None and leader.claimant.owner == connection.id and not leader.lands:
                self._lost(connection.who, flight.key, self._names.get(flight.key, _UNKNOWN), now - leader.since)
                if connection.pid == connection.who.pid:  # else it names its files in a pid namespace that is not ours
                    self._sweeper.ended(connection.pid, leader.claimant.home)
        self.carry_out(self._flights.gone(connection.id, now))

    def tick(self) -> None:
        """End the waits that have lasted for long enough. Call it about once a second."""
        actions = self._flights.tick(time.monotonic())
        for action in actions:
            if isinstance(action, act.Reply) and isinstance(action.answer, messages.Alone):
                name = self._names.get(action.claimant.key, _UNKNOWN)
                self._notices.tell(f"ranks {action.answer.why} for {name}: each compiles it for itself")
        self.carry_out(actions)

    def compiling(self) -> dict[tuple[str, str], str]:
        """The compiles on this node: key and token → the process's directory in a /proc, of those that can be seen."""
        found = {
            (flight.key, attempt.token): self._connections.process_of(attempt.claimant.owner)
            for flight in self._flights
            for attempt in flight.attempts()
            if not attempt.lands
        }
        return {compile: directory for compile, directory in found.items() if directory}

    def stalled(self, compile: tuple[str, str]) -> None:
        """A compile that `compiling` named makes no progress."""
        key, token = compile
        actions = self._flights.stalled(key, token, time.monotonic())
        if actions:
            self.stalled_ones += 1
            name = self._names.get(key, _UNKNOWN)
            self._notices.tell(
                f"a compile of {name} has not used the CPU for KCOORD_STALL_SECONDS seconds: another rank may go ahead"
            )
        self.carry_out(actions)

    def works(self, compile: tuple[str, str]) -> None:
        """A compile that `compiling` named makes progress."""
        self._flights.works(*compile)

    def carry_out(self, actions: list[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Reply):
                self._reply(action)
            else:
                self._lease_tasks.start(action)

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
            for f in self._flights
        ]

    def _tell_late(self, reply: act.Reply) -> None:
        name = self._names.get(reply.claimant.key, _UNKNOWN)
        others = ", and this node waits for none of its other compiles" if reply.late in self._flights.overdue else ""
        late = plain_text(reply.late) or "the store, or the lease service,"
        self._notices.tell(
            f"{late} takes long with {name}: {reply.claimant.who} compiles it, too{others}",
            about=f"late: {late}{others}",
        )

    def _slow_after(self, digest: str, recipe: str | None, ahead: Recipe | None) -> float:
        """A worker has a low priority, and may get no core for long: then a rank that waits for it compiles, too."""
        known = self._expectations.slow_after(digest, recipe)
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
            self._notices.tell(f"not published: {why}", about=about)
            return messages.Refused(why)
        finally:
            if why and token:  # whatever went wrong: nobody waits for a flight that does not land
                why = f"{connection.label} compiled it, but could not publish it: {why}"
                self.carry_out(self._flights.not_published(digest, token, why, time.monotonic()))
        self._landed(digest, str(artifact.path))
        return messages.Done()

    def _landed(self, digest: str, home: str) -> None:
        """An artifact in a directory that its rank throws away is for this node: a tuner compiles many, and uses one."""
        for action in self._flights.landed(digest, home):
            if isinstance(action, act.Announce) and home in self._lease_tasks.passing:
                action = act.EndLease(action.key, action.serial)
                self._lease_tasks.tiers.stays_here(digest)
            self.carry_out([action])

    def _reply(self, reply: act.Reply) -> None:
        claimant, answer = reply.claimant, reply.answer
        connection, request = self._waiting.get(claimant.id, (None, 0))
        if connection is None:
            if isinstance(answer, messages.Lead):  # the client left in this very moment: somebody else leads
                self.carry_out(self._flights.gone(claimant.owner, time.monotonic()))
        elif isinstance(answer, messages.Ready) and reply.home != claimant.home:
            self._connections.begin(connection, self._copy_then_reply(reply))
        else:
            del self._waiting[claimant.id]
            if isinstance(answer, messages.Ready):
                answer = replace(answer, landing=self._flights.landing_of(claimant.key)[1])
            if isinstance(answer, messages.Lead) and answer.hedges:
                self.hedged += 1
                self._tell_late(reply)
            self._connections.answer(connection, request, answer)

    async def _copy_then_reply(self, reply: act.Reply) -> None:
        """The artifact is at another home of the local tier than the claimant's."""
        claimant = reply.claimant
        done = await self._lease_tasks.tiers.bring_home(claimant.key, Path(reply.home), Path(claimant.home))
        if done is None and not claimant.missed and claimant.id in self._waiting:
            # the other waiters for a copy ask too, and one of them leads
            missed = self._flights.landing_of(claimant.key)[1] or -1
            self.carry_out(self._flights.claim(replace(claimant, missed=missed), time.monotonic()))
        elif done:
            self._reply(replace(reply, home=claimant.home))
            passing = self._lease_tasks.passing
            if reply.home in passing and claimant.home not in passing:  # it is used
                self._landed(claimant.key, claimant.home)
        else:
            why = f"it cannot be copied to {claimant.home}"
            self._reply(act.Reply(claimant, messages.Alone(why)))
