"""Who asks for which key, and what becomes of it: between the clients, the flights (who leads, who waits) and their errands."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kcoord.agent import actions as act
from kcoord.agent.chores.sweeping import Sweeper
from kcoord.agent.connections import Connection, Connections
from kcoord.agent.expectations import Expectations
from kcoord.agent.flight import State
from kcoord.agent.flights import Flights
from kcoord.agent.lease_tasks import LeaseTasks
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.manifest import Origin
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.keys.cache_key import CacheKey
from kcoord.protocol import fields
from kcoord.protocol.fields import (
    field as take,
)
from kcoord.protocol.fields import (
    optional,
    seconds,
)
from kcoord.protocol.identity import (
    Identity,
)
from kcoord.telemetry.events import Notices

_NAMES_REMEMBERED = 20_000
_UNKNOWN = "?:?"

Lost = Callable[[Identity, str, str, float], None]
"""``lost(who, digest, name, seconds)``: the process `who` ended while it compiled ``backend:kernel``, for so long."""


class Claims:
    """Answers `claim`, `publish`, `fail` and `give_up`. A claim waits at most `max_wait` seconds."""

    def __init__(
        self,
        connections: Connections,
        flights: Flights,
        errands: LeaseTasks,
        notices: Notices,
        max_wait: float,
        lost: Lost,
        expectations: Expectations,
        sweeper: Sweeper,
    ) -> None:
        self._connections, self._flights, self._errands, self._notices = connections, flights, errands, notices
        self._max_wait, self._lost, self._expectations, self._sweeper = max_wait, lost, expectations, sweeper
        self._waiting: dict[int, Connection] = {}  # claim → who made it
        self._names: dict[str, str] = {}  # key → backend and kernel name, for people; the latest
        self.hedged, self.stalled_ones = 0, 0

    def claim(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        self._connections.must_live(connection)
        digest, home = fields.digest(message), fields.directory(message, "home")
        waits = optional(message, "wait", bool) is not False
        name = fields.label(take(message, "backend", str), take(message, "name", str))
        self._remember(digest, name)
        self._sweeper.seen(str(home))
        now, who = time.monotonic(), connection.label(platform.node())
        claim = self._connections.new_id()
        slow = self._expectations.slow_after(name)
        claimant = act.Claimant(claim, connection.id, digest, str(home), who, now + self._max_wait, waits, slow)
        connection.pending[claim] = request
        self._waiting[claim] = connection
        self.carry_out(self._flights.claim(claimant, now))

    def publish(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        home, staging = fields.directory(message, "home"), fields.directory(message, "staging")
        key, token = fields.key(message), take(message, "token", str)
        origin = Origin.here(connection.who.pid, connection.who.rank, fields.text(message, "device"))
        took = seconds(message, "compile_seconds")
        self._expectations.learn(fields.label(key.backend, key.name), took)
        if not self._flights.landing(key.digest, token):
            token = ""  # nobody waits for it
        publish = functools.partial(self._errands.publish_locally, staging, home, key, took, origin)
        landing = self._land(connection, request, key, token, self._sweeper.sparing(staging, publish))
        self._connections.answer_later(connection, request, landing)

    def fail(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        log_text = take(message, "log", str)[-fields.LONGEST_LOG :].encode("utf-8", "replace").decode()
        where = connection.label(platform.node())
        digest, token = take(message, "digest", str), take(message, "token", str)
        self._connections.send(connection, {"op": "done", "id": request})
        self.carry_out(self._flights.failed(digest, token, log_text, where, time.monotonic()))

    def give_up(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        self._connections.send(connection, {"op": "done", "id": request})
        digest, token = take(message, "digest", str), take(message, "token", str)
        self.carry_out(self._flights.given_up(digest, token, time.monotonic()))

    def gone(self, connection: Connection) -> None:
        """A client has ended: its claims are void, and what it led has another leader."""
        for claim in connection.pending:
            self._waiting.pop(claim, None)
        now = time.monotonic()
        for flight in self._flights:
            if flight.leader is not None and flight.leader.owner == connection.id and flight.state is State.LEADING:
                name = self._names.get(flight.key, _UNKNOWN)
                self._lost(connection.who, flight.key, name, now - flight.led_since)
                if connection.pid == connection.who.pid:  # else it names its files in a pid namespace that is not ours
                    self._sweeper.ended(connection.pid, flight.leader.home)
        self.carry_out(self._flights.gone(connection.id, now))

    def tick(self) -> None:
        """Let those go who have waited for long enough. Call it about once a second."""
        self.carry_out(self._flights.tick(time.monotonic()))

    def compiling(self) -> dict[tuple[str, str], int]:
        """Who compiles on this node: key and token → process id."""
        found = {}
        for flight in self._flights:
            if flight.state is State.LEADING and flight.leader is not None:
                found[flight.key, flight.token] = self._connections.pid_of(flight.leader.owner)
            if flight.hedge is not None:
                found[flight.key, flight.hedge_token] = self._connections.pid_of(flight.hedge.owner)
        return {compile: pid for compile, pid in found.items() if pid > 0}

    def stalled(self, compile: tuple[str, str]) -> None:
        """A compile that `compiling` named gets nowhere."""
        key, token = compile
        actions = self._flights.stalled(key, token, time.monotonic())
        if actions:
            self.stalled_ones += 1
            name = self._names.get(key, _UNKNOWN)
            self._notices.tell(
                f"a compile of {name} has not used the CPU for KCOORD_STALL seconds: another rank may go ahead"
            )
        self.carry_out(actions)

    def carry_out(self, actions: list[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Tell):
                self._tell(action.claimant, action.told)
            else:
                self._errands.start(action)

    def status(self) -> list[dict[str, Any]]:
        """What is under way, for people."""
        now = time.monotonic()
        return [
            {
                "key": f.key,
                "name": self._names.get(f.key, "?"),
                "state": "waiting for another node" if f.remote else f.state.value,
                "leader": f.leader.who if f.leader else f.remote,
                "seconds": round(now - (f.led_since if f.leader else f.since), 3),
                "waiting": [w.who for w in f.waiters.values()],
            }
            for f in self._flights
        ]

    def _remember(self, digest: str, name: str) -> None:
        self._names.pop(digest, None)
        if len(self._names) >= _NAMES_REMEMBERED:
            del self._names[next(iter(self._names))]
        self._names[digest] = name

    async def _land(
        self,
        connection: Connection,
        request: int,
        key: CacheKey,
        token: str,
        publish: Callable[[], Awaitable[Artifact]],
    ) -> None:
        why = "an error in the agent; its log has it"
        try:
            artifact = await publish()
            why = ""
        except (ArtifactInvalid, StoreError) as error:
            why = str(error)
            about = f"the local directory: {error.remedy}" if isinstance(error, StoreError) else None
            self._notices.tell(f"not published: {why}", about=about)
            self._connections.send(connection, {"op": "refused", "id": request, "why": why})
        finally:
            if why and token:  # whatever went wrong: nobody waits for a flight that does not land
                why = f"{connection.label(platform.node())} compiled it, but could not publish it: {why}"
                self.carry_out(self._flights.not_published(key.digest, token, why, time.monotonic()))
        if not why:
            self._connections.send(connection, {"op": "published", "id": request, "home": str(artifact.path)})
            self.carry_out(self._flights.landed(key.digest, str(artifact.path)))

    def _tell(self, claimant: act.Claimant, told: act.Told) -> None:
        connection = self._waiting.pop(claimant.id, None)
        if connection is None:
            if isinstance(told, act.Leads):  # it left in this very moment; its end frees the flight
                self.carry_out(self._flights.gone(claimant.owner, time.monotonic()))
            return
        if isinstance(told, act.IsReady) and told.home != claimant.home:
            self._waiting[claimant.id] = connection
            self._connections.begin(connection, self._copy_then_tell(claimant, told))
            return
        request = connection.pending.pop(claimant.id)
        answer: dict[str, Any] = {"id": request}
        if isinstance(told, act.IsReady):
            answer |= {"op": "ready", "source": told.source}
        elif isinstance(told, act.Leads):
            answer |= {"op": "lead", "token": told.token, "hedges": told.hedges}
            self.hedged += told.hedges
        elif isinstance(told, act.HasFailed):
            answer |= {"op": "failed", "log": told.log, "where": told.where}
        elif isinstance(told, act.IsBusy):
            answer |= {"op": "busy"}
        else:
            answer |= {"op": "alone", "why": told.reason}
        self._connections.send(connection, answer)

    async def _copy_then_tell(self, claimant: act.Claimant, told: act.IsReady) -> None:
        done = await self._errands.bring_home(claimant.key, Path(told.home), Path(claimant.home))
        if done is None and not claimant.again and claimant.id in self._waiting:
            # whoever else waited for a copy asks too, and one of them leads
            self.carry_out(self._flights.claim(replace(claimant, again=True), time.monotonic()))
            return
        here = act.IsReady(told.source, claimant.home)
        self._tell(claimant, here if done else act.IsAlone(f"it cannot be copied to {claimant.home}"))
