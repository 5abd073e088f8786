"""The agent's clients: whom it lets in, what it reads from them and sends to them, and how it learns that they have gone."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import kcoord
from kcoord.agent.watch.processes import ProcessWatch
from kcoord.errors import ProtocolError
from kcoord.protocol import frames
from kcoord.protocol.endpoint import (
    BACKLOG,
)
from kcoord.protocol.identity import (
    Identity,
)
from kcoord.protocol.peer import peer_of
from kcoord.telemetry.events import Notices, log, tell_if_failed

_HELLO_TIMEOUT = 10.0  # seconds
_FRAME_TIMEOUT = 30.0  # seconds, from a frame's length to its last byte; between two frames a client may be silent
_LINGER = 3.0  # seconds in which what a process sent before its end is still read
_MOST_UNREAD = 4 << 20  # bytes of answers that wait for a client to read them; one frame more may be added
_MOST_PENDING = 1000  # requests of one connection that are not answered yet; a rank has one


@dataclass
class Connection:
    """One client. `pending` maps a claim, or another request that takes its time, to the request's id: it gets heartbeats."""

    id: int
    writer: asyncio.StreamWriter
    who: Identity
    pid: int
    pending: dict[int, int] = field(default_factory=dict)
    told: int = 0  # position in the agent's notices

    def label(self, node: str) -> str:
        rank = "" if self.who.rank is None else f"rank {self.who.rank}, "
        return f"{node} ({rank}pid {self.who.pid})"


class Connections:
    """Everybody who is connected. ``asked(connection, message)`` is called for each request, and raises `ProtocolError` for one
    that is none, which ends that connection; ``gone(connection)`` once, when the client's process or its connection has ended.

    `tells_clients`: the notices go to a node's first rank too.
    """

    def __init__(
        self,
        agent: str,
        notices: Notices,
        tells_clients: bool,
        asked: Callable[[Connection, dict[str, Any]], None],
        gone: Callable[[Connection], None],
    ) -> None:
        self._agent, self._notices, self.tells_clients = agent, notices, tells_clients
        self._asked, self._gone = asked, gone
        self._open: dict[int, Connection] = {}
        self._replies: dict[asyncio.Task[None], Connection] = {}  # what is worked on, and for whom
        self._ending = False
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, connection: Connection) -> bool:
        return connection.id in self._open

    def must_live(self, connection: Connection) -> None:
        """What a process sent before its end is still read. Raises `ProtocolError` if it has ended: what it is given until it
        ends, and it has ended, it would have for ever.
        """
        if connection not in self:
            raise ProtocolError("the process that made this connection has ended")

    def new_id(self) -> int:
        """A number that no connection, claim or request of this agent has had."""
        return next(self._ids)

    def pid_of(self, connection: int) -> int:
        """The process at the other end, as this host numbers it; 0 if that is not known."""
        found = self._open.get(connection)
        return found.pid if found is not None else 0

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        """Let clients in. Its `close` closes `listener`, and leaves those who are connected."""
        # the socket's name belongs to whoever bound it: a supervisor may start the next agent on it
        keep_name: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        return await asyncio.start_unix_server(
            self._client, sock=listener, limit=frames.LARGEST_FRAME, backlog=BACKLOG, **keep_name
        )

    def send(self, connection: Connection, message: dict[str, Any]) -> None:
        """Never waits. A client that does not read what it is sent is cut off: what it has not read is kept in memory."""
        if connection.writer.is_closing():
            return
        if connection.writer.transport.get_write_buffer_size() > _MOST_UNREAD:
            who = connection.label("a client")
            self._notices.tell(f"{who} does not read its answers: it is cut off", about=f"unread {connection.who.pid}")
            connection.writer.transport.abort()  # `close` would keep what is unread until the client has gone
            return
        notices, connection.told = self._notices.since(connection.told)
        if notices and self.tells_clients and connection.who.local_rank in (None, 0):
            message["told"] = notices
        connection.writer.write(frames.encode_frame(message))

    def beat(self) -> None:
        """Tell all who wait that the agent lives."""
        for connection in self._open.values():
            for request in connection.pending.values():
                self.send(connection, {"op": "waiting", "id": request})

    def answer_later(self, connection: Connection, request: int, answer: Coroutine[Any, Any, None]) -> None:
        """Run `answer`, which sends the answer; heartbeats go to the client until it has ended."""
        ticket = self.new_id()
        connection.pending[ticket] = request

        async def answered() -> None:
            try:
                await answer
            finally:
                del connection.pending[ticket]  # in the moment in which it is answered: no heartbeat follows

        self.begin(connection, answered())

    def begin(self, connection: Connection, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` for a client. An error that nobody foresaw ends its connection: all that it waits for is void."""
        task = asyncio.create_task(work)
        self._replies[task] = connection
        task.add_done_callback(functools.partial(self._replied, connection))

    async def end(self, timeout: float, every: float) -> None:
        """Let go of everybody: at once, or once what is worked on for them has been answered, within `timeout` seconds, in which
        they are told `every` so many that the agent lives.

        Who waits asks the next agent, and who compiles hands in there: of nobody is it said that it is gone.
        """
        self._ending = True
        answered = {c.id for c in self._replies.values()}
        for connection in [c for c in self._open.values() if c.id not in answered]:
            connection.writer.close()
        until = time.monotonic() + timeout
        while self._replies and (left := until - time.monotonic()) > 0:
            await asyncio.wait(self._replies, timeout=min(every, left))
            self.beat()
        for connection in list(self._open.values()):
            connection.writer.close()

    def _replied(self, connection: Connection, task: asyncio.Task[None]) -> None:
        del self._replies[task]
        if tell_if_failed(task, "a request failed", self._notices.tell):
            connection.writer.close()  # whoever asked finds out

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: Connection | None = None
        watch: ProcessWatch | None = None
        try:
            peer = peer_of(writer.get_extra_info("socket"))
            if peer.uid != os.getuid():
                raise ProtocolError(f"user {peer.uid} may not use the agent of user {os.getuid()}")
            hello = await asyncio.wait_for(_frame(reader), _HELLO_TIMEOUT)
            connection = Connection(self.new_id(), writer, Identity.from_hello(hello), peer.pid)
            self._open[connection.id] = connection
            about = {"version": kcoord.__version__, "pid": os.getpid(), "id": self._agent}
            self.send(connection, {"op": "welcome", **about})
            watch = ProcessWatch(peer.pid, lambda c=connection: self._ended(c))  # type: ignore[misc]
            while True:
                message = await _frame(reader)
                if self._ending:
                    break
                if len(connection.pending) >= _MOST_PENDING:
                    raise ProtocolError(f"{_MOST_PENDING} requests of this connection are not answered yet")
                self._asked(connection, message)
        except ProtocolError as error:
            _refuse(writer, error)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, ConnectionError):
            pass  # the client has gone; `finally` clears up after it
        except asyncio.CancelledError:
            if not self._ending:
                raise
            # the loop ends; asyncio before 3.12 calls a handler that was cancelled an error
        finally:
            if watch is not None:
                watch.close()
            if connection is not None:
                self._left(connection)
            writer.close()

    def _ended(self, connection: Connection) -> None:
        """Its process has ended. A forked child may keep the other end open for as long as it likes: ours is closed."""
        self._left(connection)
        asyncio.get_running_loop().call_later(_LINGER, connection.writer.transport.abort)

    def _left(self, connection: Connection) -> None:
        if self._open.pop(connection.id, None) is not None and not self._ending:
            self._gone(connection)


async def _frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    length = frames.frame_length(await reader.readexactly(frames.HEADER_BYTES))
    late = ProtocolError(f"a frame that is begun must be whole within {_FRAME_TIMEOUT:g} s")
    timer = asyncio.get_running_loop().call_later(_FRAME_TIMEOUT, reader.set_exception, late)
    try:
        return frames.decode_body(await reader.readexactly(length))
    finally:
        timer.cancel()


def _refuse(writer: asyncio.StreamWriter, error: ProtocolError) -> None:
    log.info("refused a client: %s", error)
    if not writer.is_closing():
        writer.write(frames.encode_frame({"op": "refused", "why": str(error)}))
