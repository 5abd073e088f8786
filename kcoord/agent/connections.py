"""The agent's clients: whom it lets in, what it reads from them and sends to them, and how it learns that they have gone."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import kcoord
from kcoord.agent import protocol
from kcoord.agent.peer import peer_of
from kcoord.agent.processes import ProcessWatch
from kcoord.agent.protocol import Identity
from kcoord.errors import ProtocolError
from kcoord.telemetry.events import Notices, log

_HELLO_TIMEOUT = 10.0  # seconds


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
        self._agent, self._notices, self._tells_clients = agent, notices, tells_clients
        self._asked, self._gone = asked, gone
        self._open: dict[int, Connection] = {}
        self._replies: set[asyncio.Task[None]] = set()
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, connection: Connection) -> bool:
        return connection.id in self._open

    def new_id(self) -> int:
        """A number that no connection, claim or request of this agent has had."""
        return next(self._ids)

    async def listen(self, listener: socket.socket) -> asyncio.Server:
        """Let clients in. Its `close` closes `listener`, and leaves those who are connected."""
        # the socket's name belongs to whoever bound it: a supervisor may start the next agent on it
        keep_name: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
        return await asyncio.start_unix_server(self._client, sock=listener, limit=protocol.LARGEST_FRAME, **keep_name)

    def send(self, connection: Connection, message: dict[str, Any]) -> None:
        if connection.writer.is_closing():
            return
        notices, connection.told = self._notices.since(connection.told)
        if notices and self._tells_clients and connection.who.local_rank in (None, 0):
            message["told"] = notices
        connection.writer.write(protocol.encode_frame(message))

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
        self._replies.add(task)
        task.add_done_callback(functools.partial(self._replied, connection))

    async def drain(self, timeout: float) -> None:
        """Let the answers that are under way be sent, within `timeout` seconds."""
        if self._replies:
            await asyncio.wait(self._replies, timeout=timeout)

    def close(self) -> None:
        for connection in list(self._open.values()):
            connection.writer.close()

    def _replied(self, connection: Connection, task: asyncio.Task[None]) -> None:
        self._replies.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._notices.tell(f"an error in the agent, please report it: {type(error).__name__}: {error}")
            log.error("a request failed", exc_info=error)
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
            watch = ProcessWatch(peer.pid, lambda c=connection: self._left(c))  # type: ignore[misc]
            while True:
                self._asked(connection, await _frame(reader))
        except ProtocolError as error:
            _refuse(writer, error)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, ConnectionError):
            pass  # the client has gone; `finally` clears up after it
        finally:
            if watch is not None:
                watch.close()
            if connection is not None:
                self._left(connection)
            writer.close()

    def _left(self, connection: Connection) -> None:
        if self._open.pop(connection.id, None) is not None:
            self._gone(connection)


async def _frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    length = protocol.frame_length(await reader.readexactly(protocol.HEADER_BYTES))
    return protocol.decode_body(await reader.readexactly(length))


def _refuse(writer: asyncio.StreamWriter, error: ProtocolError) -> None:
    log.info("refused a client: %s", error)
    if not writer.is_closing():
        writer.write(protocol.encode_frame({"op": "refused", "why": str(error)}))
