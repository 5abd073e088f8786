"""The rank's side of the agent socket: synchronous, thread-safe, fork-safe, and never stuck.

A rank that leads keeps the claim's connection until it publishes or fails: the end of the connection tells the agent that the
leader is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kcoord.errors import AgentUnavailable, ProtocolError
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.protocol import fields, frames, messages
from kcoord.protocol.messages import BUSY as BUSY
from kcoord.protocol.messages import Alone as Alone
from kcoord.protocol.messages import Busy as Busy
from kcoord.protocol.messages import Failed as Failed
from kcoord.protocol.messages import Ready as Ready
from kcoord.protocol.own_socket import OwnSocket
from kcoord.rank.connection_pool import ConnectionPool
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

A = TypeVar("A", bound=messages.Answer)

_LONGEST_SHOWN = 200  # characters of a kernel's name
# seconds, of a request that waits for no other rank; heartbeats say meanwhile that the agent lives
_LONGEST_ANSWER = 60.0
_ATTEMPTS = (1, 2, 3)  # one connection was idle since an agent that is gone, the next one's agent is ending just now
_FAULTS = (AgentUnavailable, OSError, ProtocolError)


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
    """One process's access to the agent. Not guaranteed: that there is one; then every claim is `Alone`, soon.

    `quietly`: the lack of an agent is not told. `start` is false: none is started.
    """

    def __init__(self, settings: Settings, notices: Notices) -> None:
        self._settings, self._notices = settings, notices
        self._links = ConnectionPool(settings, notices)

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
        self._links.give_back(connection)
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
        self._links.close()

    def _finish(self, lead: Lead | None, request: messages.Request) -> bool:
        """True if the agent is `Done`: on the lead's connection or, if that is broken (a new agent), on another one."""
        frame = _frame_of(request)
        if lead is not None and not lead.ended:
            lead.ended = True
            try:
                answer = self._links.exchange(lead.connection, frame, _LONGEST_ANSWER)
            except TimeoutError as error:  # the agent hangs: another connection would be waited for as long again
                let_through(error)
                self._links.declare_dead(error)
                return False
            except (OSError, ProtocolError) as error:
                let_through(error)
                self._links.close()  # the agent has gone; its successor takes finished work from anyone
            else:
                self._links.give_back(lead.connection)
                return isinstance(answer, messages.Done)
        return isinstance(self._asked(frame), messages.Done)

    def _asked(self, frame: bytes, *, quietly: bool = False, start: bool = True) -> messages.Answer | None:
        try:
            answer, connection = self._answered(frame, _LONGEST_ANSWER, quietly=quietly, start=start)
        except _FAULTS as error:
            let_through(error)
            return None
        self._links.give_back(connection)
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
        """The answer to `frame`, and its connection, which is the caller's. Raises one of `_FAULTS`."""
        for attempt in _ATTEMPTS:
            try:
                connection = self._links.borrow(fresh=attempt > 1, start=start)
                return self._links.exchange(connection, frame, patience, while_waiting), connection
            except _FAULTS as error:
                let_through(error)
                self._links.close()  # connections to a dead agent come in numbers
                if attempt == _ATTEMPTS[-1] or isinstance(error, (AgentUnavailable, TimeoutError)):
                    if start:  # else it may be that none was needed yet
                        self._links.declare_dead(error, quietly=quietly)
                    raise
        raise AssertionError("unreachable")


def _frame_of(request: messages.Request) -> bytes:
    return frames.encode_frame(request.to_wire(1))
