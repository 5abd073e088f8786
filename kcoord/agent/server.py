"""The agent: one asyncio process per node that answers claims, watches processes, and speaks to Redis and the store."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import platform
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kcoord
from kcoord.agent import flights as fl
from kcoord.agent import protocol
from kcoord.agent.choices import Choices
from kcoord.agent.errands import Errands
from kcoord.agent.ledger import Ledger
from kcoord.agent.peer import peer_of
from kcoord.agent.permits import Permits
from kcoord.agent.processes import ProcessWatch
from kcoord.agent.profiles import Profiles
from kcoord.agent.protocol import HEARTBEAT, Identity, optional, seconds
from kcoord.agent.protocol import field as take
from kcoord.agent.statistics import Share, Statistics
from kcoord.agent.timelines import Timelines
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.manifest import Origin
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, ProtocolError, StoreError
from kcoord.keys.cache_key import CacheKey
from kcoord.leases.base import LeaseService
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices, log

_DRAIN = 10.0  # seconds that publishes get when the agent is told to stop
_HELLO_TIMEOUT = 10.0
_NAMES_REMEMBERED = 20_000


@dataclass
class Connection:
    """One client. `pending` maps a claim's or publish's id to the request that waits for its answer."""

    id: int
    writer: asyncio.StreamWriter
    who: Identity
    pid: int
    pending: dict[int, int] = field(default_factory=dict)
    told: int = 0  # position in the agent's notices

    def label(self, node: str) -> str:
        rank = "" if self.who.rank is None else f"rank {self.who.rank}, "
        return f"{node} ({rank}pid {self.who.pid})"


class Agent:
    """Serves one listening socket until it is stopped, or, as a daemon, until it has been idle for long enough.

    `tells_clients`: its notices go to a node's first rank too, for an agent whose own log nobody looks at.
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
    ) -> None:
        self.id = f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._settings, self._leases, self._notices, self._daemon = (
            settings,
            leases,
            notices,
            daemon,
        )
        self._tells_clients = tells_clients
        self._flights = fl.Flights(limit=settings.lease_limit, failure_ttl=settings.failure_ttl)
        self._errands = Errands(
            leases, store, self._flights, notices,
            agent_id=self.id, ttl=settings.lease_ttl, now=time.monotonic, report=self._carry_out,
        )  # fmt: skip
        self._choices = Choices(self._errands, settings.local_dir, settings.agent_timeout, notices)
        self._connections: dict[int, Connection] = {}
        self._claims: dict[int, Connection] = {}
        self._ids = itertools.count(1)
        self._names: dict[str, str] = {}  # key → backend and kernel name, for people
        ledger = Ledger(settings.local_dir, self.id)
        with suppress(OSError):  # another agent may be forgetting the same files
            ledger.forget_old()
        self._statistics = Statistics(ledger, self.id, notices, share)
        self._profiles = Profiles(store.root if store else None, settings.local_dir, notices)
        self._timelines = Timelines(store.root if store else None, settings.local_dir, self.id, notices)
        self._permits = Permits(settings.ahead)
        self._started, self._last_used = time.time(), time.monotonic()
        self._stopping = asyncio.Event()
        self._replies: set[asyncio.Task[None]] = set()
        self._saving: asyncio.Task[None] | None = None
        # a claim that waits hears from us well within the time after which it takes us for dead
        self._beat = min(HEARTBEAT, settings.agent_timeout / 3)

    def stop(self) -> None:
        self._stopping.set()

    async def serve(self, listener: socket.socket) -> None:
        """Serve until stopped; then drain: finish publishes, release leases. The listener is closed."""
        # the socket's name belongs to whoever bound it: a supervisor may start the next agent on it
        keep_name: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        server = await asyncio.start_unix_server(self._client, sock=listener, limit=protocol.LARGEST_FRAME, **keep_name)
        pulse = asyncio.create_task(self._pulse())
        try:
            await self._stopping.wait()
        finally:
            server.close()
            pulse.cancel()
            if self._replies:
                await asyncio.wait(self._replies, timeout=_DRAIN)
            await asyncio.gather(
                self._errands.drain(_DRAIN), self._profiles.drain(_DRAIN), self._timelines.drain(_DRAIN)
            )
            if self._saving is not None:
                await asyncio.wait({self._saving}, timeout=_DRAIN)
            await self._statistics.save()
            for connection in list(self._connections.values()):
                connection.writer.close()
            await self._leases.close()

    # Connections.

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: Connection | None = None
        watch: ProcessWatch | None = None
        try:
            peer = peer_of(writer.get_extra_info("socket"))
            if peer.uid != os.getuid():
                raise ProtocolError(f"user {peer.uid} may not use the agent of user {os.getuid()}")
            hello = await asyncio.wait_for(self._frame(reader), _HELLO_TIMEOUT)
            connection = Connection(next(self._ids), writer, Identity.from_hello(hello), peer.pid)
            self._connections[connection.id] = connection
            self._send(
                connection,
                {"op": "welcome", "version": kcoord.__version__, "pid": os.getpid(), "id": self.id},
            )
            watch = ProcessWatch(peer.pid, lambda c=connection: self._gone(c))  # type: ignore[misc]
            while True:
                await self._request(connection, await self._frame(reader))
        except ProtocolError as error:
            self._refuse(writer, error)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, ConnectionError):
            pass  # the client has gone; `finally` clears up after it
        finally:
            if watch is not None:
                watch.close()
            if connection is not None:
                self._gone(connection)
            writer.close()

    async def _frame(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        length = protocol.frame_length(await reader.readexactly(protocol.HEADER_BYTES))
        return protocol.decode_body(await reader.readexactly(length))

    def _refuse(self, writer: asyncio.StreamWriter, error: ProtocolError) -> None:
        log.info("refused a client: %s", error)
        if not writer.is_closing():
            writer.write(protocol.encode_frame({"op": "refused", "why": str(error)}))

    def _send(self, connection: Connection, message: dict[str, Any]) -> None:
        if connection.writer.is_closing():
            return
        notices, connection.told = self._notices.since(connection.told)
        if notices and self._tells_clients and connection.who.local_rank in (None, 0):
            message["told"] = notices
        connection.writer.write(protocol.encode_frame(message))

    def _gone(self, connection: Connection) -> None:
        if self._connections.pop(connection.id, None) is None:
            return
        self._last_used = time.monotonic()
        self._permits.gone(connection.id)
        for claim in connection.pending:
            self._claims.pop(claim, None)
        for flight in self._flights:
            if flight.leader is not None and flight.leader.owner == connection.id and flight.state is fl.State.LEADING:
                name, seconds = self._names.get(flight.key, "?:?"), time.monotonic() - flight.led_since
                self._timelines.lost(connection.who, flight.key, name, seconds)
        self._carry_out(self._flights.gone(connection.id, time.monotonic()))

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(self._beat)
            self._carry_out(self._flights.tick(time.monotonic()))
            for connection in self._connections.values():
                for request in connection.pending.values():
                    self._send(connection, {"op": "waiting", "id": request})
            if self._saving is None or self._saving.done():  # apart: a dead Redis must not delay a heartbeat
                self._saving = asyncio.create_task(self._statistics.save())
            self._profiles.pulse()
            self._permits.look()
            self._timelines.pulse()
            busy = self._connections or self._errands.busy
            if busy:
                self._last_used = time.monotonic()
            elif self._daemon and time.monotonic() - self._last_used > self._settings.idle_timeout:
                self.stop()

    # Requests.

    async def _request(self, connection: Connection, message: dict[str, Any]) -> None:
        request = take(message, "id", int)
        op = take(message, "op", str)
        if op == "claim":
            self._claim(connection, request, message)
        elif op == "publish":
            self._publish(connection, request, message)
        elif op == "lookup":
            self._background(connection, self._choose(connection, request, self._choices.lookup(message)))
        elif op == "offer":
            offer = self._choices.offer(message, connection.who.pid, connection.who.rank)
            self._background(connection, self._choose(connection, request, offer))
        elif op == "fail":
            log_text = take(message, "log", str)[-protocol.LONGEST_LOG :].encode("utf-8", "replace").decode()
            where = connection.label(platform.node())
            digest, token = take(message, "digest", str), take(message, "token", str)
            self._send(connection, {"op": "done", "id": request})
            self._carry_out(self._flights.failed(digest, token, log_text, where, time.monotonic()))
        elif op == "give_up":
            self._send(connection, {"op": "done", "id": request})
            digest, token = take(message, "digest", str), take(message, "token", str)
            self._carry_out(self._flights.given_up(digest, token, time.monotonic()))
        elif op == "report":
            self._statistics.add(connection.who.job, take(message, "counters", dict))
            self._timelines.add(connection.who, message)
            self._send(connection, {"op": "done", "id": request})
        elif op == "record":
            self._profiles.add(take(message, "profile", str), take(message, "recipes", list))
            self._send(connection, {"op": "done", "id": request})
        elif op == "permit":
            self._send(connection, {"op": "permit", "id": request, "granted": self._permits.ask(connection.id)})
        elif op == "status":
            self._send(connection, {"op": "status", "id": request, **self.status()})
        elif op == "stats":
            self._background(connection, self._total(connection, request, optional(message, "job", str)))
        elif op == "stop":
            self._send(connection, {"op": "done", "id": request})
            self.stop()
        else:
            raise ProtocolError(f"there is no request {op!r}")

    def _background(self, connection: Connection, reply: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(reply)
        self._replies.add(task)
        task.add_done_callback(functools.partial(self._replied, connection))

    def _replied(self, connection: Connection, task: asyncio.Task[None]) -> None:
        self._replies.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._notices.tell(f"an error in the agent, please report it: {type(error).__name__}: {error}")
            log.error("a request failed", exc_info=error)
            connection.writer.close()  # whoever asked finds out, and everything it waits for is void

    async def _total(self, connection: Connection, request: int, job: str | None) -> None:
        self._send(connection, {"op": "stats", "id": request, **await self._statistics.total(job)})

    def _claim(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        if connection.id not in self._connections:
            raise ProtocolError("the process that made this connection has ended")
        digest, home = protocol.digest(message), protocol.directory(message, "home")
        waits = optional(message, "wait", bool) is not False
        if len(self._names) < _NAMES_REMEMBERED:
            self._names[digest] = f"{take(message, 'backend', str)}:{take(message, 'name', str)}"
        now = time.monotonic()
        claim = next(self._ids)
        who = connection.label(platform.node())
        claimant = fl.Claimant(claim, connection.id, digest, str(home), who, now + self._settings.max_wait, waits)
        connection.pending[claim] = request
        self._claims[claim] = connection
        self._carry_out(self._flights.claim(claimant, now))

    def _publish(self, connection: Connection, request: int, message: dict[str, Any]) -> None:
        home, staging = protocol.directory(message, "home"), protocol.directory(message, "staging")
        key, token = protocol.key(message), take(message, "token", str)
        origin = Origin.here(connection.who.pid, connection.who.rank, take(message, "device", str))
        took = seconds(message, "compile_seconds")
        leads = self._flights.landing(key.digest, token)
        publish = functools.partial(self._errands.publish_locally, staging, home, key, took, origin)
        self._background(connection, self._land(connection, request, key, token if leads else "", publish))

    async def _land(
        self,
        connection: Connection,
        request: int,
        key: CacheKey,
        token: str,
        publish: Callable[[], Awaitable[Artifact]],
    ) -> None:
        ticket = next(self._ids)
        connection.pending[ticket] = request  # heartbeats while the disk is slow
        why = "an error in the agent; its log has it"
        try:
            artifact = await publish()
            why = ""
        except (ArtifactInvalid, StoreError) as error:
            why = str(error)
            self._notices.tell(f"not published: {why}")
            self._send(connection, {"op": "refused", "id": request, "why": why})
        finally:
            connection.pending.pop(ticket)
            if why and token:  # whatever went wrong: nobody waits for a flight that does not land
                why = f"it was compiled, but could not be published: {why}"
                where = connection.label(platform.node())
                self._carry_out(self._flights.failed(key.digest, token, why, where, time.monotonic()))
        if not why:
            self._send(connection, {"op": "published", "id": request, "home": str(artifact.path)})
            self._carry_out(self._flights.landed(key.digest, str(artifact.path)))

    async def _choose(self, connection: Connection, request: int, choice: Awaitable[dict[str, Any]]) -> None:
        ticket = next(self._ids)
        connection.pending[ticket] = request  # heartbeats while the store is slow
        try:
            answer = await choice
        finally:
            connection.pending.pop(ticket)
        self._send(connection, {"id": request, **answer})

    def _carry_out(self, actions: list[fl.Action]) -> None:
        for action in actions:
            if isinstance(action, fl.Tell):
                self._tell(action.claimant, action.told)
            else:
                self._errands.start(action)

    def _tell(self, claimant: fl.Claimant, told: fl.Told) -> None:
        connection = self._claims.pop(claimant.id, None)
        if connection is None:
            if isinstance(told, fl.Leads):  # it left in this very moment; its end frees the flight
                self._carry_out(self._flights.gone(claimant.owner, time.monotonic()))
            return
        if isinstance(told, fl.IsReady) and told.home != claimant.home:
            self._claims[claimant.id] = connection
            self._background(connection, self._copy_then_tell(connection, claimant, told))
            return
        request = connection.pending.pop(claimant.id)
        answer: dict[str, Any] = {"id": request}
        if isinstance(told, fl.IsReady):
            answer |= {"op": "ready", "source": told.source}
        elif isinstance(told, fl.Leads):
            answer |= {"op": "lead", "token": told.token}
        elif isinstance(told, fl.HasFailed):
            answer |= {"op": "failed", "log": told.log, "where": told.where}
        elif isinstance(told, fl.IsBusy):
            answer |= {"op": "busy"}
        else:
            answer |= {"op": "alone", "why": told.reason}
        self._send(connection, answer)

    async def _copy_then_tell(self, connection: Connection, claimant: fl.Claimant, told: fl.IsReady) -> None:
        done = await self._errands.bring_home(claimant.key, Path(told.home), Path(claimant.home))
        here = fl.IsReady(told.source, claimant.home)
        self._tell(claimant, here if done else fl.IsAlone(f"it cannot be copied to {claimant.home}"))

    # What people ask.

    def status(self) -> dict[str, Any]:
        now = time.monotonic()
        return {
            "agent": self.id,
            "pid": os.getpid(),
            "version": kcoord.__version__,
            "started": self._started,
            "coordinates": self._leases.name,
            "clients": len(self._connections),
            "settings": self._settings.redacted(),
            "notices": self._notices.since(0)[0],
            "flights": [
                {
                    "key": f.key,
                    "name": self._names.get(f.key, "?"),
                    "state": "waiting for another node" if f.remote else f.state.value,
                    "leader": f.leader.who if f.leader else f.remote,
                    "seconds": round(now - (f.led_since if f.leader else f.since), 3),
                    "waiting": [w.who for w in f.waiters.values()],
                }
                for f in self._flights
            ],
        }
