"""The rank's side of the agent socket: synchronous, thread-safe, fork-safe, and never stuck.

Each request borrows a connection of its own, so a claim that waits for minutes blocks no other. A rank that leads keeps the
claim's connection until it publishes or fails: its end tells the agent that the leader is gone. A forked child has none.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kcoord.errors import AgentUnavailable, ProtocolError
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.protocol import fields, frames, messages
from kcoord.protocol.endpoint import log_of
from kcoord.protocol.identity import Identity
from kcoord.protocol.messages import BUSY as BUSY
from kcoord.protocol.messages import Alone as Alone
from kcoord.protocol.messages import Busy as Busy
from kcoord.protocol.messages import Failed as Failed
from kcoord.protocol.messages import Ready as Ready
from kcoord.protocol.own_socket import OwnSocket
from kcoord.rank import spawn
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

A = TypeVar("A", bound=messages.Answer)

_LONGEST_SHOWN = 200  # characters of a kernel's name
_LONGEST_NOTICE = 4096  # characters
_AT_ONCE = 0.005  # seconds; a slower answer counts as a wait
_RETRY_AFTER = 5.0  # seconds without a request after the agent was found dead
_LOOK_AFTER = 0.25  # seconds, if somebody else is to start it, and the look took no longer: most take microseconds
# seconds, of a request that waits for no other rank; heartbeats say meanwhile that the agent lives
_LONGEST_ANSWER = 60.0
_ATTEMPTS = (1, 2, 3)  # one connection was idle since an agent that is gone, the next one's agent is ending just now
_FAULTS = (AgentUnavailable, OSError, ProtocolError)


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


@dataclass
class Lead:
    """This rank compiles, and holds the connection by which the agent knows that it lives.

    `ended`: the agent knows how the compile ended, and the connection may be another request's.
    """

    granted: messages.Lead
    connection: OwnSocket
    ended: bool = False

    @property
    def token(self) -> str:
        return self.granted.token

    @property
    def hedges(self) -> bool:
        """True if another rank compiles the key too, and is slow."""
        return self.granted.hedges


Answer = Ready | Lead | Failed | Alone | Busy


class AgentClient:
    """One process's access to the agent, which may be absent, hang, or have been restarted: then every claim is `Alone`, soon.

    It passes the agent's notices on to `notices`. `quietly`: the lack of an agent is not told. `start` is false: none is started.
    """

    def __init__(self, settings: Settings, notices: Notices) -> None:
        self._settings, self._notices = settings, notices
        # protects the two below; reentrant, since a signal's handler may come while its thread is in here
        self._lock = threading.RLock()
        self._idle: list[OwnSocket] = []
        self._dead_until = 0.0
        self._open: weakref.WeakSet[OwnSocket] = weakref.WeakSet()  # all, for a forked child to close
        forgets_after_fork(self)

    def claim(
        self,
        key: CacheKey,
        home: Path,
        *,
        wait: bool = True,
        recipe: str | None = None,
        while_waiting: Callable[[], None] | None = None,
        passing: bool = False,
    ) -> Answer:
        """Ask for `key`; wait while another rank compiles it, at most `longest_wait` seconds, or, without `wait`, get `BUSY`.

        Without `wait`, too, an artifact that is in the store is waited for. `recipe` is the digest of the key's recipe.
        `while_waiting` is called once, if the answer takes longer than some milliseconds; it must return at once, and not raise.
        `passing` is that of `messages.Claim`.
        """
        try:
            fields.check_key(key)  # else others would wait for an artifact that cannot be handed in
            frame = _frame_of(messages.Claim(key.digest, key.backend, key.name, home, wait, recipe, passing))
        except ProtocolError as error:
            return Alone(str(error))
        patience = self._settings.longest_wait + self._settings.agent_timeout
        try:
            answer, connection = self._answered(frame, patience, while_waiting=while_waiting)
        except _FAULTS as error:
            let_through(error)
            return Alone(f"no agent: {error}")
        if isinstance(answer, messages.Lead):
            return Lead(answer, connection)
        self._give_back(connection)
        if isinstance(answer, (Ready, Failed, Alone, Busy)):
            return answer
        return Alone(f"no agent: it answered {answer.op!r}")

    def publish(
        self, lead: Lead | None, key: CacheKey, staging: Path, home: Path, compile_seconds: float, device: str
    ) -> bool:
        """Hand staged files in; True once the artifact is at `home`. False: the agent refused or is gone.

        A key that fits no frame is not handed in, which says nothing about the kernel: the next rank leads.
        """
        token = lead.token if lead else ""
        try:
            return self._finish(
                lead, messages.Publish(fields.carried(key), token, staging, home, compile_seconds, device)
            )
        except ProtocolError as error:
            self._notices.tell(f"{key.name[:_LONGEST_SHOWN]} is not shared: {error}")
            if lead is not None:
                self.give_up(lead, key)
            return False

    def fail(self, lead: Lead, key: CacheKey, log: str) -> None:
        """The compile failed: everyone who waits learns it at once."""
        self._finish(lead, messages.Fail(key.digest, lead.token, fields.shortened_log(log)))

    def give_up(self, lead: Lead, key: CacheKey, why: str = "") -> None:
        """This rank does not compile after all; the next one leads.

        With `why` it has compiled, and cannot share its files: ranks that wait on this node compile at once, since the next
        leader may fare no better.
        """
        self._finish(lead, messages.GiveUp(key.digest, lead.token, why))

    def status(self, *, quietly: bool = False, start: bool = True) -> dict[str, Any] | None:
        """The agent's status, as ``kcoord status --json`` prints it. None: no agent."""
        answer = self.ask(messages.Status(), messages.Facts, quietly=quietly, start=start)
        return None if answer is None else answer.facts

    def stats(self, job: str | None = None, *, quietly: bool = False) -> dict[str, Any] | None:
        """The ``figures`` of ``job`` on this node, by default of the latest one. None: no agent."""
        answer = self.ask(messages.Stats(job), messages.Facts, quietly=quietly)
        return None if answer is None else answer.facts

    def stop(self, *, quietly: bool = False) -> bool:
        """Tell the agent to end. False: no agent."""
        return self.ask(messages.Stop(), messages.Done, quietly=quietly) is not None

    def ask(
        self, request: messages.Request, expected: type[A], *, quietly: bool = False, start: bool = True
    ) -> A | None:
        """The answer to `request`, which waits for no other rank; None if there is no agent, or it answers something else.

        Raises `ProtocolError` if the request is too large for a frame.
        """
        answer = self._asked(_frame_of(request), quietly=quietly, start=start)
        return answer if isinstance(answer, expected) else None

    def close(self) -> None:
        """Close idle connections; the next request opens another."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def forget_after_fork(self) -> None:
        """Close the child's copies of its parent's connections; the parent's stay open."""
        self._lock = threading.RLock()
        for connection in list(self._open):
            connection.close()
        self._idle, self._open = [], weakref.WeakSet()

    def _finish(self, lead: Lead | None, request: messages.Request) -> bool:
        """True if the agent is `Done`: on the lead's connection or, if that is broken (a new agent), on another one."""
        frame = _frame_of(request)
        if lead is not None and not lead.ended:
            lead.ended, begun = True, time.monotonic()
            try:
                answer = self._exchange(lead.connection, frame, begun + _LONGEST_ANSWER)
            except TimeoutError as error:  # the agent hangs: another connection would be waited for as long again
                let_through(error)
                self._declare_dead(error, begun)
                return False
            except (OSError, ProtocolError) as error:
                let_through(error)
                self.close()  # the agent has gone; its successor takes finished work from anyone
            else:
                self._give_back(lead.connection)
                return isinstance(answer, messages.Done)
        return isinstance(self._asked(frame), messages.Done)

    def _asked(self, frame: bytes, *, quietly: bool = False, start: bool = True) -> messages.Answer | None:
        try:
            answer, connection = self._answered(frame, _LONGEST_ANSWER, quietly=quietly, start=start)
        except _FAULTS as error:
            let_through(error)
            return None
        self._give_back(connection)
        return answer

    def _answered(
        self,
        frame: bytes,
        patience: float,
        *,
        quietly: bool = False,
        start: bool = True,
        while_waiting: Callable[[], None] | None = None,
    ) -> tuple[messages.Answer, OwnSocket]:
        """The answer to `frame` within `patience` seconds, and its connection, which is the caller's. Raises one of `_FAULTS`."""
        deadline = time.monotonic() + patience
        for attempt in _ATTEMPTS:
            begun = time.monotonic()
            try:
                connection = self._borrow(fresh=attempt > 1, start=start)
                return self._exchange(connection, frame, deadline, while_waiting), connection
            except _FAULTS as error:
                let_through(error)
                self.close()  # connections to a dead agent come in numbers
                if attempt == _ATTEMPTS[-1] or isinstance(error, (AgentUnavailable, TimeoutError)):
                    if start:  # else it may be that none was needed yet
                        self._declare_dead(error, begun, quietly=quietly)
                    raise
        raise AssertionError("unreachable")

    def _borrow(self, *, fresh: bool = False, start: bool = True) -> OwnSocket:
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
            hello = Identity.here(self._settings).hello()
            frames.send_first_frame(connection, frames.encode_frame(hello))
            self._receive(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _give_back(self, connection: OwnSocket) -> None:
        """Lend `connection` again."""
        with self._lock:
            self._idle.append(connection)

    def _exchange(
        self,
        connection: OwnSocket,
        frame: bytes,
        deadline: float,
        while_waiting: Callable[[], None] | None = None,
    ) -> messages.Answer:
        """Send `frame`, and wait for its answer until `deadline`, as long as the agent's heartbeats arrive.

        ``while_waiting()`` is called once, if there is a wait. After an error the connection is closed. Raises OSError, and
        `ProtocolError` if the agent refuses or its reply is malformed.
        """
        try:
            connection.check()
            frames.send_frame(connection, frame)
            if while_waiting is not None and not _answers_within(connection, _AT_ONCE):
                while_waiting()
            while (reply := self._receive(connection)).get("op") == "waiting":
                if time.monotonic() > deadline:
                    raise TimeoutError("the agent took too long")
            return messages.parse_answer(reply)
        except BaseException:  # also if interrupted: to the agent an open connection is a claim, or a working leader
            connection.close()
            raise

    def _declare_dead(self, error: Exception, begun: float, *, quietly: bool = False) -> None:
        """Open no connection for a while after a request that `begun` has failed; say so, unless `quietly`."""
        looks = not self._settings.spawn and time.monotonic() - begun < _LOOK_AFTER
        with self._lock:
            first = time.monotonic() >= self._dead_until
            if first:  # a call that was refused meanwhile does not extend the pause
                self._dead_until = time.monotonic() + (_LOOK_AFTER if looks else _RETRY_AFTER)
        self.close()
        if first and not quietly:
            ended = isinstance(error, ConnectionError) and self._settings.spawn
            why = f"the agent ended: {error}; see {log_of(self._settings.socket_path)}" if ended else error
            self._notices.tell(
                f"no agent ({why}); kernels are compiled without coordination until there is one", about="no agent"
            )

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


def _frame_of(request: messages.Request) -> bytes:
    return frames.encode_frame(request.to_wire(1))


def _answers_within(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()  # not select.select: a rank may have more than 1024 files open
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
