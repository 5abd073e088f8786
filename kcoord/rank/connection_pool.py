"""A rank's connections to its agent, which may not be there yet, hang, or have been started again.

Each call borrows a connection of its own, so a claim that waits for minutes holds up nobody. A forked child forgets its parent's
connections.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kcoord.errors import AgentUnavailable, ProtocolError
from kcoord.interruption import let_through
from kcoord.protocol import endpoint, fields, frames
from kcoord.protocol.identity import (
    Identity,
)
from kcoord.protocol.own_socket import OwnSocket
from kcoord.rank import spawn
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

_LONGEST_NOTICE = 4096  # characters
_AT_ONCE = 0.005  # seconds; an answer that takes longer is being waited for
_LOOK_EVERY = 0.05  # seconds, for an agent that is being started again
_RETRY_AFTER = 5.0  # seconds without asking, after the agent was found dead


class Links:
    """Connections that are lent, one to each call. What the agent has to tell people goes to `notices`."""

    def __init__(self, settings: Settings, notices: Notices) -> None:
        self._settings, self._notices = settings, notices
        # protects the two below; a signal's handler may come while its thread is in here
        self._lock = threading.RLock()
        self._idle: list[OwnSocket] = []
        self._dead_until = 0.0
        self._met = False  # an agent, since one was last waited for in vain
        self._open: weakref.WeakSet[OwnSocket] = weakref.WeakSet()  # all, for a forked child to close
        _links.add(self)

    def borrow(self, *, fresh: bool = False, start: bool = True) -> OwnSocket:
        """A connection to an agent; without `start` none is started. Raises `AgentUnavailable`, OSError and `ProtocolError`."""
        with self._lock:
            if not fresh:
                with suppress(IndexError):
                    return self._idle.pop()
            if time.monotonic() < self._dead_until:
                raise AgentUnavailable("the agent was found dead a moment ago")
        for attempt in (1, 2):  # a daemon may end in the moment between our connect and its accept
            connection = OwnSocket(self._reach(start))
            self._open.add(connection)
            connection.settimeout(self._settings.agent_timeout)
            try:
                connection.sendall(frames.encode_frame(Identity.here(self._settings.job).hello()), socket.MSG_NOSIGNAL)
                self._frame(connection)
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
        """It is idle, and may be lent again."""
        with self._lock:
            self._idle.append(connection)

    def round_trip(self, connection: OwnSocket, frame: bytes, patience: float) -> dict[str, Any]:
        """The answer, which comes within `patience` seconds. Raises OSError, and `ProtocolError` if it is none."""
        try:
            reply = self.exchange(connection, frame, time.monotonic() + patience)
        except BaseException:  # also if interrupted: it is the proof that somebody is at it
            connection.close()
            raise
        self.give_back(connection)
        return reply

    def exchange(
        self, connection: OwnSocket, frame: bytes, deadline: float, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Send `frame`, and wait until `deadline` for its answer; the agent says meanwhile that it lives.

        ``meanwhile()`` is called once, if there is a wait. The connection is the caller's still, whatever comes of it. Raises
        OSError, and `ProtocolError` if the agent refuses, or says what is no answer.
        """
        if not connection.is_ours():
            raise ConnectionResetError("the script has closed its descriptor")
        # an agent that has gone must not end a script that restored SIGPIPE
        connection.sendall(frame, socket.MSG_NOSIGNAL)
        if meanwhile is not None and not _answers_within(connection, _AT_ONCE):
            meanwhile()
        while True:
            if time.monotonic() > deadline:
                raise TimeoutError("the agent took too long")
            reply = self._frame(connection)
            if reply.get("op") != "waiting":
                return reply

    def close(self) -> None:
        """Let go of the idle ones."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def declare_dead(self, error: Exception, *, quietly: bool = False) -> None:
        """For some seconds nobody is to ask it; that is told, but `quietly`."""
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

    def forget_after_fork(self) -> None:
        """In the child: its parent's are not its own."""
        self._lock = threading.RLock()
        for connection in list(self._open):
            connection.close()  # the child's copy only: the parent's stays open
        self._idle, self._open = [], weakref.WeakSet()

    def _reach(self, start: bool) -> socket.socket:
        """An agent that was there and is not ours to start is a sidecar's, which is started again within seconds: it is waited
        for, once, by those who would else compile what other ranks compile. Raises `AgentUnavailable`."""
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

    def _frame(self, connection: socket.socket) -> dict[str, Any]:
        length = frames.frame_length(_receive(connection, frames.HEADER_BYTES))
        message = frames.decode_body(_receive(connection, length))
        told = message.pop("told", [])
        if not isinstance(message.get("op"), str) or not isinstance(told, list):
            raise ProtocolError("the agent's answer is none")
        for notice in told:
            if isinstance(notice, str):
                self._notices.tell(notice[:_LONGEST_NOTICE])
        if message.get("op") == "refused" and "id" not in message:
            raise ProtocolError(str(fields.field(message, "why", str)))
        return message


_links: weakref.WeakSet[Links] = weakref.WeakSet()


def _forget_all() -> None:
    for links in list(_links):
        links.forget_after_fork()


os.register_at_fork(after_in_child=_forget_all)


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
