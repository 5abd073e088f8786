"""What a rank asks its agent, and what it hears: synchronous, thread-safe, fork-safe, and never stuck.

A claim that is told to lead keeps its connection until it publishes or fails: its end tells the agent that the leader is gone.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kcoord.errors import AgentUnavailable, ProtocolError
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.protocol import fields, frames
from kcoord.protocol.own_socket import OwnSocket
from kcoord.rank.connection_pool import ConnectionPool
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

_LONGEST_SHOWN = 200  # characters of a kernel's name
_LONGEST_ANSWER = 60.0  # seconds, of a request that waits for no other rank; the agent says meanwhile that it lives
_ATTEMPTS = (1, 2, 3)  # one connection was idle since an agent that is gone, the next one's agent is ending just now


@dataclass(frozen=True)
class Ready:
    """The artifact is at the home that was asked for. `source`: ``store`` or ``wait``."""

    source: str


@dataclass
class Lead:
    """This rank compiles. The connection is the proof that it is at it. `hedges`: somebody else is at it too, and slow.

    `ended`: the agent has been told how it ended, and the connection may be another request's.
    """

    token: str
    connection: OwnSocket
    hedges: bool = False
    ended: bool = False


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
        self._links = ConnectionPool(settings, notices)

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
            fields.check_key(key)  # else others would wait for what nobody can hand in
            frame = _frame_of(request)
        except ProtocolError as error:
            return Alone(str(error))
        deadline = time.monotonic() + self._settings.max_wait + self._settings.agent_timeout
        for attempt in _ATTEMPTS:
            try:
                connection = self._links.borrow(fresh=attempt > 1)
                try:
                    reply = self._links.exchange(connection, frame, deadline, meanwhile)
                    answer = _answer(reply, connection)
                except BaseException as error:
                    connection.close()  # also if interrupted: whoever keeps the exception would keep the claim, and be led to
                    if isinstance(error, (OSError, ProtocolError)):
                        self._links.close()  # connections to a dead agent come in numbers
                    raise
                if not isinstance(answer, Lead):
                    self._links.give_back(connection)
                return answer
            except (AgentUnavailable, OSError, ProtocolError) as error:
                let_through(error)
                if attempt == _ATTEMPTS[-1] or isinstance(error, (AgentUnavailable, TimeoutError)):
                    self._links.declare_dead(error)
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
        """Hand staged files in; True once the artifact is at `home`. False: the agent refused or is gone.

        A key that fits no frame is not handed in, which says nothing about the kernel: the next rank leads.
        """
        try:
            request = {
                "op": "publish",
                "key": fields.carried(key).to_wire(),
                "token": lead.token if lead else "",
                "staging": str(staging),
                "home": str(home),
                "compile_seconds": compile_seconds,
                "device": device,
            }
            reply = self._finish(lead, request)
        except ProtocolError as error:
            self._notices.tell(f"{key.name[:_LONGEST_SHOWN]} is not shared: {error}")
            if lead is not None:
                self.give_up(lead, key)
            return False
        return reply is not None and reply["op"] == "published"

    def fail(self, lead: Lead, key: CacheKey, log: str) -> None:
        """The compile failed: everyone who waits learns it at once."""
        log = log[-fields.LONGEST_LOG :].encode("utf-8", "replace").decode()
        self._finish(lead, {"op": "fail", "digest": key.digest, "token": lead.token, "log": log})

    def give_up(self, lead: Lead, key: CacheKey) -> None:
        """This rank does not compile after all; the next one leads."""
        self._finish(lead, {"op": "give_up", "digest": key.digest, "token": lead.token})

    def report(
        self,
        counters: dict[str, float],
        spans: Sequence[list[Any]] = (),
        dropped: int = 0,
        sender: tuple[str, int] | None = None,
    ) -> bool:
        """Add to the job's statistics and time line. False: no answer came; an agent is not started for them.

        With `sender`, a name that only this process has and the report's number, one that is sent again is counted once.
        """
        request: dict[str, Any] = {"op": "report", "counters": counters, "spans": list(spans), "dropped": dropped}
        if sender is not None:
            request["process"], request["number"] = sender
        return self._finish(None, request, quietly=True, start=False) is not None

    def lookup(self, key: CacheKey) -> bytes | None:
        """The choice that was made for `key`, from this node or the store. Waits for no other rank's. None: none, or no agent."""
        return _choice(self.ask({"op": "lookup", "digest": key.digest}))

    def offer(self, key: CacheKey, content: bytes, seconds: float, device: str) -> bytes | None:
        """The choice that holds for `key` from now on: `content`, or what another rank offered before. None: nobody keeps it.

        Raises `ProtocolError` if it fits no frame.
        """
        known = fields.carried(key).to_wire()
        request = {"op": "offer", "key": known, "content": content, "seconds": seconds, "device": device}
        return _choice(self.ask(request))

    def record(self, profile: str, recipes: list[dict[str, Any]]) -> bool:
        """Add to a profile. False: they were not delivered; an agent is not started for them. Raises `ProtocolError`."""
        request = {"op": "record", "profile": profile, "recipes": recipes}
        return self._finish(None, request, quietly=True, start=False) is not None

    def ask(self, request: dict[str, Any], *, quietly: bool = False, start: bool = True) -> dict[str, Any] | None:
        """One request and its answer, within the agent's time-out; None if there is no agent, and none is to be started."""
        return self._finish(None, request, quietly=quietly, start=start)

    def close(self) -> None:
        """Let go of the agent; the next request reaches for it again."""
        self._links.close()

    def _finish(
        self, lead: Lead | None, request: dict[str, Any], *, quietly: bool = False, start: bool = True
    ) -> dict[str, Any] | None:
        """Send on the lead's connection; if that is broken (a new agent), or there is none, on another one.

        Raises `ProtocolError` if the request is too large for a frame.
        """
        frame = _frame_of(request)
        if lead is not None:
            lead.ended = True
            try:
                return self._links.round_trip(lead.connection, frame, _LONGEST_ANSWER)
            except TimeoutError as error:  # it hangs: another connection would be waited for as long again
                let_through(error)
                self._links.declare_dead(error, quietly=quietly)
                return None
            except (OSError, ProtocolError) as error:
                let_through(error)
                self._links.close()  # the agent has gone; its successor takes finished work from anyone
        for attempt in _ATTEMPTS:
            try:
                return self._links.round_trip(
                    self._links.borrow(fresh=attempt > 1, start=start), frame, _LONGEST_ANSWER
                )
            except (AgentUnavailable, OSError, ProtocolError) as error:
                let_through(error)
                self._links.close()
                if attempt == _ATTEMPTS[-1] or isinstance(error, (AgentUnavailable, TimeoutError)):
                    if start:  # else it may be that none was needed yet
                        self._links.declare_dead(error, quietly=quietly)
                    return None
        raise AssertionError("unreachable")


def _frame_of(request: dict[str, Any]) -> bytes:
    return frames.encode_frame({"id": 1, **request})


def _choice(reply: dict[str, Any] | None) -> bytes | None:
    content = None if reply is None or reply.get("op") != "choice" else reply.get("content")
    return content if isinstance(content, bytes) else None


def _text(reply: dict[str, Any], name: str) -> str:
    """Raises `ProtocolError` if the agent sent another thing."""
    return str(fields.field(reply, name, str))


def _answer(reply: dict[str, Any], connection: OwnSocket) -> Answer:
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
