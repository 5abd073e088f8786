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
from kcoord.protocol import fields, frames
from kcoord.protocol.endpoint import log_of
from kcoord.protocol.frames import send_first_frame
from kcoord.protocol.identity import Identity
from kcoord.protocol.messages import Answer, parse_answer
from kcoord.protocol.own_socket import OwnSocket
from kcoord.rank import spawn
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

_LONGEST_NOTICE = 4096  # characters
_AT_ONCE = 0.005  # seconds; a slower answer counts as a wait
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
        connection = OwnSocket(spawn.find_or_start(self._settings, start=start))
        self._open.add(connection)
        connection.settimeout(self._settings.agent_timeout)
        try:
            who = Identity.here(self._settings)
            send_first_frame(connection, frames.encode_frame(who.hello()))
            self._receive(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def give_back(self, connection: OwnSocket) -> None:
        """Lend `connection` again."""
        with self._lock:
            self._idle.append(connection)

    def exchange(
        self,
        connection: OwnSocket,
        frame: bytes,
        patience: float,
        while_waiting: Callable[[], None] | None = None,
    ) -> Answer:
        """Send `frame`, and wait `patience` seconds for its answer, as long as the agent's heartbeats arrive.

        ``while_waiting()`` is called once, if there is a wait. After an error the connection is closed. Raises OSError, and
        `ProtocolError` if the agent refuses or its reply is malformed.
        """
        deadline = time.monotonic() + patience
        try:
            connection.check()
            frames.send_frame(connection, frame)
            if while_waiting is not None and not _answers_within(connection, _AT_ONCE):
                while_waiting()
            while (reply := self._receive(connection)).get("op") == "waiting":
                if time.monotonic() > deadline:
                    raise TimeoutError("the agent took too long")
            return parse_answer(reply)
        except BaseException:  # also if interrupted: to the agent an open connection is a claim, or a working leader
            connection.close()
            raise

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
            ended = isinstance(error, ConnectionError) and self._settings.spawn
            why = f"the agent ended: {error}; see {log_of(self._settings.socket_path)}" if ended else error
            self._notices.tell(
                f"no agent ({why}); kernels are compiled without coordination until there is one", about="no agent"
            )

    def forget_after_fork(self) -> None:
        """Close the child's copies of its parent's connections; the parent's stay open."""
        self._lock = threading.RLock()
        for connection in list(self._open):
            connection.close()
        self._idle, self._open = [], weakref.WeakSet()

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
