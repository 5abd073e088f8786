"""A rank's connections to its agent, which may be absent, hang, or have been restarted.

Each call borrows a connection of its own, so a claim that waits for minutes blocks no other. A forked child starts without any.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from kcoord.errors import AgentUnavailable, ProtocolError
from kcoord.interruption import let_through
from kcoord.protocol import endpoint, fields, frames
from kcoord.protocol.identity import Expected, Identity
from kcoord.protocol.own_socket import OwnSocket
from kcoord.protocol.peer import send_first_frame
from kcoord.rank import spawn
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

_LONGEST_NOTICE = 4096  # characters
_AT_ONCE = 0.005  # seconds; a slower answer counts as a wait
_LOOK_EVERY = 0.05  # seconds, for an agent that is being restarted
_RETRY_AFTER = 5.0  # seconds without a request after the agent was found dead


class _Forgetful(Protocol):
    def forget_after_fork(self) -> None: ...


_registered: weakref.WeakSet[_Forgetful] = weakref.WeakSet()


def forgets_after_fork(thing: _Forgetful) -> None:
    """Call ``thing.forget_after_fork()`` in every child that is forked while `thing` lives. Keeps no reference to it.

    A child must not share sockets, counters, or locks that another thread of its parent held.
    """
    _registered.add(thing)


def _forget_all() -> None:
    for thing in list(_registered):
        thing.forget_after_fork()


os.register_at_fork(after_in_child=_forget_all)


class ConnectionPool:
    """Lends one connection to each call. Passes the agent's notices on to `notices`. Thread-safe and fork-safe."""

    def __init__(self, settings: Settings, notices: Notices) -> None:
        self._settings, self._notices = settings, notices
        # protects the two below; reentrant, since a signal's handler may come while its thread is in here
        self._lock = threading.RLock()
        self._idle: list[OwnSocket] = []
        self._dead_until = 0.0
        self._met = False  # an agent has answered since the last wait for one was in vain
        self._open: weakref.WeakSet[OwnSocket] = weakref.WeakSet()  # all, for a forked child to close
        forgets_after_fork(self)

    def borrow(self, *, fresh: bool = False, start: bool = True) -> OwnSocket:
        """A connection to an agent; without `start` none is started. Raises `AgentUnavailable`, OSError and `ProtocolError`."""
        with self._lock:
            if not fresh:
                with suppress(IndexError):
                    return self._idle.pop()
            if time.monotonic() < self._dead_until:
                raise AgentUnavailable("the agent was found dead a moment ago")
        for attempt in (1, 2):  # a daemon may end between our connect and its accept
            connection = OwnSocket(self._connect(start))
            self._open.add(connection)
            connection.settimeout(self._settings.agent_timeout)
            try:
                who = Identity.here(self._settings.job, expected=Expected.of(self._settings))
                send_first_frame(connection, frames.encode_frame(who.hello()))
                self._receive(connection)
            except ConnectionError as error:
                connection.close()
                let_through(error)
                if attempt == 2:
                    why = f"; see {endpoint.log_of(self._settings.socket_path)}" if self._settings.spawn else ""
                    raise AgentUnavailable(f"the agent ended: {error}{why}") from error
            except (OSError, ProtocolError):
                connection.close()
                raise
            else:
                return connection
        raise AssertionError("unreachable")

    def give_back(self, connection: OwnSocket) -> None:
        """Lend `connection` again."""
        with self._lock:
            self._idle.append(connection)

    def round_trip(self, connection: OwnSocket, frame: bytes, patience: float) -> dict[str, Any]:
        """`exchange`, within `patience` seconds; then the connection is given back, or closed after an error."""
        try:
            reply = self.exchange(connection, frame, time.monotonic() + patience)
        except BaseException:  # also if interrupted: the agent takes an open connection for a working leader
            connection.close()
            raise
        self.give_back(connection)
        return reply

    def exchange(
        self, connection: OwnSocket, frame: bytes, deadline: float, while_waiting: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Send `frame`, and wait for its answer until `deadline`, as long as the agent's heartbeats arrive.

        ``while_waiting()`` is called once, if there is a wait, which a heartbeat may be the first to tell. The connection stays
        the caller's, also after an error. Raises OSError, and `ProtocolError` if the agent refuses or its reply is malformed.
        """
        connection.check()
        frames.send_frame(connection, frame)
        if while_waiting is not None and not _answers_within(connection, _AT_ONCE):
            while_waiting()
            while_waiting = None
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError("the agent took too long")
            reply = self._receive(connection)
            if reply.get("op") != "waiting":
                return reply
            if while_waiting is not None:
                while_waiting()
                while_waiting = None

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def declare_dead(self, error: Exception, *, quietly: bool = False) -> None:
        """Open no connection for `_RETRY_AFTER` seconds; say so, unless `quietly`."""
        with self._lock:
            first = time.monotonic() >= self._dead_until
            if first:  # a call that was refused meanwhile does not extend the pause
                self._dead_until = time.monotonic() + _RETRY_AFTER
        self.close()
        if first and not quietly:
            self._notices.tell(
                f"no agent ({error}); kernels are compiled without coordination until there is one", about="no agent"
            )

    def forget_after_fork(self) -> None:
        """Close the child's copies of its parent's connections; the parent's stay open."""
        self._lock = threading.RLock()
        for connection in list(self._open):
            connection.close()
        self._idle, self._open = [], weakref.WeakSet()

    def _connect(self, start: bool) -> socket.socket:
        """Find or start an agent. Raises `AgentUnavailable`.

        An agent that was there and that this process must not start is a sidecar's, which restarts within seconds: wait for it,
        once, where the alternative is to compile what other ranks compile.
        """
        patience = self._settings.agent_timeout if self._met and start and not self._settings.spawn else 0.0
        deadline = time.monotonic() + patience
        while True:
            try:
                found = spawn.find_or_start(self._settings, start=start)
            except AgentUnavailable as error:
                let_through(error)
                if time.monotonic() >= deadline:
                    self._met = self._met and not patience
                    raise
                time.sleep(_LOOK_EVERY)
            else:
                self._met = True
                return found

    def _receive(self, connection: socket.socket) -> dict[str, Any]:
        message = frames.receive_frame(connection)
        lines = message.pop("told", [])
        if not isinstance(message.get("op"), str) or not isinstance(lines, list):
            raise ProtocolError("the agent's reply is malformed")
        for line in lines:
            if isinstance(line, str):
                self._notices.tell(line[:_LONGEST_NOTICE])
        if message.get("op") == "refused" and "id" not in message:
            raise ProtocolError(str(fields.field(message, "why", str)))
        return message


def _answers_within(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()  # not select.select: a rank may have more than 1024 files open
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
