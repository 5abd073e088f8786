"""A rank's side of the agent: synchronous, thread-safe, fork-safe, and never stuck.

Each call borrows a connection of its own, so a claim that waits for minutes holds up nobody. A claim that is told to lead
keeps its connection until it publishes or fails: its end tells the agent that the leader is gone. A forked child forgets
its parent's connections.
"""

from __future__ import annotations

import enum
import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kcoord.agent import protocol, spawn
from kcoord.agent.protocol import Identity
from kcoord.errors import AgentUnavailable, ProtocolError
from kcoord.keys.cache_key import CacheKey
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

_LONGEST_NOTICE = 4096  # characters
_AT_ONCE = 0.005  # seconds; an answer that takes longer is being waited for
_LONGEST_ANSWER = 60.0  # seconds, of a request that waits for no other rank; the agent says meanwhile that it lives
_ATTEMPTS = (1, 2, 3)  # one connection was idle since an agent that is gone, the next one's agent is ending just now
_LOOK_EVERY = 0.05  # seconds, for an agent that is being started again
_RETRY_AFTER = 5.0  # seconds without asking, after the agent was found dead


@dataclass(frozen=True)
class Ready:
    """The artifact is at the home that was asked for. `source`: ``store`` or ``wait``."""

    source: str


@dataclass
class Lead:
    """This rank compiles. The connection is the proof that it is at it. `hedges`: somebody else is at it too, and slow."""

    token: str
    connection: socket.socket
    hedges: bool = False


@dataclass(frozen=True)
class Failed:
    """Another rank's compile failed, a moment ago."""

    log: str
    where: str


@dataclass(frozen=True)
class Alone:
    """Nobody coordinates this key."""

    why: str


class Busy(enum.Enum):
    """Another rank is at it, here or on another node. Told only to a claim that does not wait."""

    BUSY = "busy"


BUSY: Final = Busy.BUSY
Answer = Ready | Lead | Failed | Alone | Busy


class AgentClient:
    """This process's way to the agent. Not guaranteed: that there is one; then every claim is `Alone`, soon."""

    def __init__(self, settings: Settings, notices: Notices) -> None:
        self._settings, self._notices = settings, notices
        self._lock = threading.Lock()  # protects the two below
        self._idle: list[socket.socket] = []
        self._dead_until = 0.0
        self._met = False  # an agent, since one was last waited for in vain
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # all, for a forked child to close
        _clients.add(self)

    def claim(
        self, key: CacheKey, home: Path, *, wait: bool = True, meanwhile: Callable[[], None] | None = None
    ) -> Answer:
        """Ask for `key`; wait while another rank compiles it, at most `max_wait` seconds, or, without `wait`, hear `BUSY`.

        Without `wait` too it is waited for what there is already: it is fetched from the store. `meanwhile` is called once, if
        the answer takes longer than some milliseconds; it must return at once, and not raise.
        """
        request: dict[str, Any] = {
            "op": "claim",
            "digest": key.digest,
            "backend": key.backend,
            "name": key.name,
            "home": str(home),
        }
        if not wait:
            request["wait"] = False
        try:
            frame = _frame_of(request)
        except ProtocolError as error:
            return Alone(str(error))
        deadline = time.monotonic() + self._settings.max_wait + self._settings.agent_timeout
        for attempt in _ATTEMPTS:
            try:
                connection = self._borrow(fresh=attempt > 1)
                try:
                    reply = self._exchange(connection, frame, deadline, meanwhile)
                    answer = _answer(reply, connection)
                except BaseException as error:
                    connection.close()  # also if interrupted: whoever keeps the exception would keep the claim, and be led to
                    if isinstance(error, (OSError, ProtocolError)):
                        self.close()  # connections to a dead agent come in numbers
                    raise
                if not isinstance(answer, Lead):
                    self._give_back(connection)
                return answer
            except (AgentUnavailable, OSError, ProtocolError) as error:
                if attempt == _ATTEMPTS[-1] or isinstance(error, (AgentUnavailable, TimeoutError)):
                    self._declare_dead(error)
                    return Alone(f"no agent: {error}")
        raise AssertionError("unreachable")

    def publish(
        self,
        lead: Lead | None,
        key: CacheKey,
        staging: Path,
        home: Path,
        compile_seconds: float,
        device: str,
    ) -> bool:
        """Hand staged files in; True once the artifact is at `home`. False: the agent refused or is gone."""
        request = {
            "op": "publish",
            "key": key.to_wire(),
            "token": lead.token if lead else "",
            "staging": str(staging),
            "home": str(home),
            "compile_seconds": compile_seconds,
            "device": device,
        }
        try:
            reply = self._finish(lead, request)
        except ProtocolError as error:
            self._notices.tell(f"{key.name} is not shared: {error}")
            if lead is not None:
                self.fail(lead, key, str(error))
            return False
        return reply is not None and reply["op"] == "published"

    def fail(self, lead: Lead, key: CacheKey, log: str) -> None:
        """The compile failed: everyone who waits learns it at once."""
        log = log[-protocol.LONGEST_LOG :].encode("utf-8", "replace").decode()
        self._finish(lead, {"op": "fail", "digest": key.digest, "token": lead.token, "log": log})

    def give_up(self, lead: Lead, key: CacheKey) -> None:
        """This rank does not compile after all; the next one leads."""
        self._finish(lead, {"op": "give_up", "digest": key.digest, "token": lead.token})

    def report(self, counters: dict[str, float], spans: Sequence[list[Any]] = (), dropped: int = 0) -> bool:
        """Add to the job's statistics and time line. False: not delivered; an agent is not started for them."""
        request = {"op": "report", "counters": counters, "spans": list(spans), "dropped": dropped}
        return self._finish(None, request, quietly=True, start=False) is not None

    def lookup(self, key: CacheKey) -> bytes | None:
        """The choice that was made for `key`, from this node or the store. Waits for no other rank's. None: none, or no agent."""
        return _choice(self.ask({"op": "lookup", "digest": key.digest}))

    def offer(self, key: CacheKey, content: bytes, seconds: float, device: str) -> bytes | None:
        """The choice that holds for `key` from now on: `content`, or what another rank offered before. None: nobody keeps it."""
        request = {"op": "offer", "key": key.to_wire(), "content": content, "seconds": seconds, "device": device}
        return _choice(self.ask(request))

    def record(self, profile: str, recipes: list[dict[str, Any]]) -> bool:
        """Add to a profile. False: they were not delivered; an agent is not started for them. Raises `ProtocolError`."""
        request = {"op": "record", "profile": profile, "recipes": recipes}
        return self._finish(None, request, quietly=True, start=False) is not None

    def ask(self, request: dict[str, Any], *, quietly: bool = False, start: bool = True) -> dict[str, Any] | None:
        """One request and its answer, within the agent's time-out; None if there is no agent, and none is to be started."""
        return self._finish(None, request, quietly=quietly, start=start)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _finish(
        self, lead: Lead | None, request: dict[str, Any], *, quietly: bool = False, start: bool = True
    ) -> dict[str, Any] | None:
        """Send on the lead's connection; if that is broken (a new agent), or there is none, on another one.

        Raises `ProtocolError` if the request is too large for a frame.
        """
        frame = _frame_of(request)
        if lead is not None:
            try:
                return self._round_trip(lead.connection, frame)
            except TimeoutError as error:  # it hangs: another connection would be waited for as long again
                self._declare_dead(error, quietly=quietly)
                return None
            except (OSError, ProtocolError):
                self.close()  # the agent has gone; its successor takes finished work from anyone
        for attempt in _ATTEMPTS:
            try:
                return self._round_trip(self._borrow(fresh=attempt > 1, start=start), frame)
            except (AgentUnavailable, OSError, ProtocolError) as error:
                self.close()
                if attempt == _ATTEMPTS[-1] or isinstance(error, (AgentUnavailable, TimeoutError)):
                    if start:  # else it may be that none was needed yet
                        self._declare_dead(error, quietly=quietly)
                    return None
        raise AssertionError("unreachable")

    def _round_trip(self, connection: socket.socket, frame: bytes) -> dict[str, Any]:
        try:
            reply = self._exchange(connection, frame, time.monotonic() + _LONGEST_ANSWER)
        except BaseException:  # also if interrupted: it is the proof that somebody is at it
            connection.close()
            raise
        self._give_back(connection)
        return reply

    def _exchange(
        self, connection: socket.socket, frame: bytes, deadline: float, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        connection.sendall(
            frame, socket.MSG_NOSIGNAL
        )  # an agent that has gone must not end a script that restored SIGPIPE
        if meanwhile is not None and not _answers_within(connection, _AT_ONCE):
            meanwhile()
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError("the agent took too long")
            reply = self._frame(connection)
            if reply.get("op") != "waiting":
                return reply

    def _frame(self, connection: socket.socket) -> dict[str, Any]:
        length = protocol.frame_length(_receive(connection, protocol.HEADER_BYTES))
        message = protocol.decode_body(_receive(connection, length))
        told = message.pop("told", [])
        if not isinstance(message.get("op"), str) or not isinstance(told, list):
            raise ProtocolError("the agent's answer is none")
        for notice in told:
            if isinstance(notice, str):
                self._notices.tell(notice[:_LONGEST_NOTICE])
        if message.get("op") == "refused" and "id" not in message:
            raise ProtocolError(_text(message, "why"))
        return message

    def _borrow(self, *, fresh: bool = False, start: bool = True) -> socket.socket:
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop()
            if time.monotonic() < self._dead_until:
                raise AgentUnavailable("the agent was found dead a moment ago")
        for attempt in (1, 2):  # a daemon may end in the moment between our connect and its accept
            connection = self._reach(start)
            self._open.add(connection)
            connection.settimeout(self._settings.agent_timeout)
            try:
                connection.sendall(
                    protocol.encode_frame(Identity.here(self._settings.job).hello()), socket.MSG_NOSIGNAL
                )
                self._frame(connection)
            except (ConnectionError, EOFError) as error:
                connection.close()
                if attempt == 2:
                    raise AgentUnavailable(f"the agent ended: {error}") from error
            except (OSError, ProtocolError):
                connection.close()
                raise
            else:
                return connection
        raise AssertionError("unreachable")

    def _reach(self, start: bool) -> socket.socket:
        """An agent that was there and is not ours to start is a sidecar's, which is started again within seconds: it is waited
        for, once, by those who would else compile what other ranks compile. Raises `AgentUnavailable`."""
        patience = self._settings.agent_timeout if self._met and start and not self._settings.spawn else 0.0
        deadline = time.monotonic() + patience
        while True:
            try:
                found = spawn.find_or_start(self._settings, start=start)
            except AgentUnavailable:
                if time.monotonic() >= deadline:
                    self._met = self._met and not patience
                    raise
                time.sleep(_LOOK_EVERY)
            else:
                self._met = True
                return found

    def _give_back(self, connection: socket.socket) -> None:
        with self._lock:
            self._idle.append(connection)

    def _declare_dead(self, error: Exception, *, quietly: bool = False) -> None:
        with self._lock:
            first = time.monotonic() >= self._dead_until
            if first:  # else it was not asked just now, and is to be asked when the time has come
                self._dead_until = time.monotonic() + _RETRY_AFTER
        self.close()
        if first and not quietly:
            self._notices.tell(
                f"no agent ({error}); kernels are compiled without coordination until there is one",
                about="no agent",
            )

    def _forget_after_fork(self) -> None:
        self._lock = threading.Lock()
        for connection in list(self._open):
            connection.close()  # the child's copy only: the parent's stays open
        self._idle, self._open = [], weakref.WeakSet()


_clients: weakref.WeakSet[AgentClient] = weakref.WeakSet()


def _forget_all() -> None:
    for client in list(_clients):
        client._forget_after_fork()


os.register_at_fork(after_in_child=_forget_all)


def _frame_of(request: dict[str, Any]) -> bytes:
    return protocol.encode_frame({"id": 1, **request})


def _answers_within(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()  # not select.select: a rank may have more than 1024 files open
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _receive(connection: socket.socket, length: int) -> bytes:
    """A part of a frame. What has begun to come must come at once: within the connection's own time-out."""
    buffer, patience = bytearray(), connection.gettimeout()
    deadline = math.inf
    while len(buffer) < length:
        if time.monotonic() > deadline:
            raise TimeoutError("the agent's answer comes too slowly")
        chunk = connection.recv(length - len(buffer))
        if not chunk:
            raise ConnectionResetError("the agent closed the connection")
        buffer += chunk
        deadline = min(deadline, math.inf if patience is None else time.monotonic() + patience)
    return bytes(buffer)


def _choice(reply: dict[str, Any] | None) -> bytes | None:
    content = None if reply is None or reply.get("op") != "choice" else reply.get("content")
    return content if isinstance(content, bytes) else None


def _text(reply: dict[str, Any], name: str) -> str:
    """Raises `ProtocolError` if the agent sent another thing."""
    return str(protocol.field(reply, name, str))


def _answer(reply: dict[str, Any], connection: socket.socket) -> Answer:
    op = reply.get("op")
    if op == "lead":
        return Lead(_text(reply, "token"), connection, reply.get("hedges") is True)
    if op == "ready":
        return Ready(_text(reply, "source"))
    if op == "failed":
        return Failed(_text(reply, "log"), _text(reply, "where"))
    if op == "alone":
        return Alone(_text(reply, "why"))
    if op == "busy":
        return BUSY
    raise ProtocolError(f"the agent answered {op!r:.100}")
