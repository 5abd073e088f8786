"""The agent's clients: connections, frames in both directions, and the end of a client's process.

Frames are parsed here, and answers encoded; nobody above this file sees a frame. A client's first bytes are received by
``recvmsg``, for the descriptors that come with them, which asyncio would drop; then its socket becomes a stream.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import platform
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kcoord
from kcoord.agent.process_watch import ProcessWatch
from kcoord.errors import ProtocolError
from kcoord.protocol import frames
from kcoord.protocol.endpoint import BACKLOG
from kcoord.protocol.frames import Peer, peer_of, receive_first
from kcoord.protocol.identity import Identity
from kcoord.protocol.messages import Answer, Request, parse_request
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices, log, tell_if_failed

if TYPE_CHECKING:
    from kcoord.agent.metrics import Metrics

_HELLO_TIMEOUT = 10.0  # seconds
_FRAME_TIMEOUT = 30.0  # seconds, from a frame's length to its last byte; between two frames a client may be silent
_BREATHER = 0.2  # seconds, while there are too many open files
_LINGER = 3.0  # seconds, after the end of a process, in which the frames that it had sent are still read


@dataclass
class Connection:
    """One client. `unanswered` maps a request's id to the request, and the moment at which it arrived."""

    id: int
    transport: asyncio.Transport
    who: Identity
    pid: int
    unanswered: dict[int, tuple[Request, float]] = field(default_factory=dict)
    came: int = 0  # position in the agent's notices
    notices_sent: int = 0  # position there
    watch: ProcessWatch | None = None

    @functools.cached_property
    def label(self) -> str:
        """For people."""
        who = "pool, " if self.who.pool else "" if self.who.rank is None else f"rank {self.who.rank}, "
        return f"{platform.node()} ({who}pid {self.who.pid})"


class Connections:
    """All clients. One whose expectations contradict `settings` is refused. `tells_clients`: notices go to a node's first rank,
    too.
    """

    def __init__(
        self,
        agent: str,
        notices: Notices,
        tells_clients: bool,
        metrics: Metrics | None = None,
        settings: Settings | None = None,
        hello_timeout: float = _HELLO_TIMEOUT,
        frame_timeout: float = _FRAME_TIMEOUT,
    ) -> None:
        self._hello_timeout, self._frame_timeout = hello_timeout, frame_timeout
        self._agent, self._notices, self.tells_clients = agent, notices, tells_clients
        self._metrics, self._settings = metrics, settings
        self._open: dict[int, Connection] = {}
        self._tasks: dict[asyncio.Task[None], Connection] = {}  # work for a client
        self._serving: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive
        self._arriving: set[asyncio.Task[None]] = set()  # of these, clients that have not said hello
        self._asked: Callable[[Connection, int, Request], None]
        self._gone: Callable[[Connection], None]
        self._ending = False
        self.ids = itertools.count(1)
        """Numbers that no connection, claim or request of this agent has had."""

    def __len__(self) -> int:
        return len(self._open)

    def has_job(self, job: str) -> bool:
        """True if a client of this job is connected."""
        return any(connection.who.job == job for connection in self._open.values())

    def must_live(self, connection: Connection) -> None:
        """Raises `ProtocolError` if the client's process has ended. Its earlier requests are still read, and a lead, a permit or
        an attendance ends with its process: granted after that, it would never end.
        """
        if connection.id not in self._open:
            raise ProtocolError("the process that made this connection has ended")

    def of(self, number: int) -> Connection | None:
        """The client with this `Connection.id`, while it is connected."""
        return self._open.get(number)

    def process_of(self, connection: int) -> str:
        """The directory of a client's process in a procfs; empty if this agent cannot see it."""
        found = self.of(connection)
        return found.watch.directory if found is not None and found.watch is not None else ""

    def listen(
        self,
        listener: socket.socket,
        asked: Callable[[Connection, int, Request], None],
        gone: Callable[[Connection], None],
    ) -> Callable[[], None]:
        """Let clients in. The function that is returned closes the listener, and clients that have not said hello.

        ``asked(connection, request id, message)`` handles a request; its `ProtocolError` ends the connection.
        ``gone(connection)`` is called once, when the client's process or its connection has ended.
        """
        self._asked, self._gone = asked, gone
        listener.listen(BACKLOG)
        listener.setblocking(False)
        accepting = asyncio.create_task(self._accept(listener))

        def close() -> None:
            for task in (accepting, *self._arriving):
                task.cancel()
            listener.close()

        return close

    def answer(self, connection: Connection, request: int, answer: Answer) -> None:
        """Send the answer to the request with the id `request`. Never waits."""
        message, since = connection.unanswered.pop(request)
        if self._metrics is not None:
            self._metrics.answered(message, answer, time.monotonic() - since)
        self._send(connection, answer.to_wire(request))

    def _send(self, connection: Connection, frame: dict[str, Any]) -> None:
        if connection.transport.is_closing():
            return
        notices, connection.notices_sent = self._notices.since(connection.notices_sent, connection.came)
        if notices and self.tells_clients and connection.who.local_rank in (None, 0):
            frame["told"] = notices
        connection.transport.write(frames.encode_frame(frame))

    def beat(self) -> None:
        """Send a heartbeat to each client that waits for an answer."""
        for connection in self._open.values():
            for request in connection.unanswered:
                self._send(connection, {"op": "waiting", "id": request})

    def answer_later(self, connection: Connection, request: int, answer: Awaitable[Answer]) -> None:
        """Send the result of `answer` once it is there, and heartbeats until then. `ProtocolError` ends the connection."""

        async def answered() -> None:
            try:
                self.answer(connection, request, await answer)
            except ProtocolError as error:
                _refuse(connection.transport, error)

        self.begin(connection, answered())

    def begin(self, connection: Connection, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` for a client. An unforeseen error ends the connection, and with it all requests of the client."""
        task = asyncio.create_task(work)
        self._tasks[task] = connection
        task.add_done_callback(functools.partial(self._ended_work, connection))

    async def end(self, timeout: float, every: float) -> None:
        """Close all connections: at once, or, where work for a client is under way, after its answer, within `timeout` seconds. A
        heartbeat goes out `every` so many seconds.

        A waiter asks the next agent, and a leader hands in there, so `gone` is called for nobody.
        """
        self._ending = True
        answered = {c.id for c in self._tasks.values()}
        for connection in [c for c in self._open.values() if c.id not in answered]:
            connection.transport.close()
        until = time.monotonic() + timeout
        while self._tasks and (left := until - time.monotonic()) > 0:
            await asyncio.wait(self._tasks, timeout=min(every, left))
            self.beat()
        for connection in list(self._open.values()):
            connection.transport.close()

    def _ended_work(self, connection: Connection, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if tell_if_failed(task, "a request failed", self._notices.tell):
            connection.transport.close()  # so the client finds out

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError:  # the connection stays in the queue
                await asyncio.sleep(_BREATHER)
                continue
            task = asyncio.create_task(self._serve(client))
            self._serving.add(task)
            self._arriving.add(task)
            task.add_done_callback(self._served)
            await asyncio.sleep(0)  # thousands may be in the queue

    async def _serve(self, client: socket.socket) -> None:
        """Serve one client until it leaves. Reads nothing that another user's process sends."""
        connection, passed, transport = None, list[int](), None
        try:
            peer, first = peer_of(client), b""
            async with asyncio.timeout(self._hello_timeout):
                if peer.uid == os.getuid():
                    await _readable(client)
                    first, passed = receive_first(client)
                reader, transport = await _stream(client, first)
                if peer.uid != os.getuid():
                    raise ProtocolError(f"user {peer.uid} may not use the agent of user {os.getuid()}")
                hello = await self._frame(reader)
            if hello is None:
                return
            connection = self._hello(transport, peer, hello)
            connection.watch = ProcessWatch(peer.pid, functools.partial(self._ended, connection), passed)
            passed = []
            self._arriving.discard(asyncio.current_task())
            while (frame := await self._frame(reader)) is not None:
                self._said(connection, frame)
        except ProtocolError as error:
            if transport is not None:
                _refuse(transport, error)
        except (OSError, TimeoutError):
            pass  # the client broke off, or sent no hello in time
        finally:
            for descriptor in passed:
                os.close(descriptor)
            if transport is None:
                client.close()
            else:  # the transport waits until its answers are read, which may be never: call `gone` now
                transport.close()
            if connection is not None:
                self._lost(connection)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._arriving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": "a client's connection ends", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    async def _frame(self, reader: asyncio.StreamReader) -> dict[str, Any] | None:
        """The client's next frame; None after its last. Raises `ProtocolError` and OSError."""
        try:
            length = frames.frame_length(await reader.readexactly(frames.HEADER_BYTES))
            async with asyncio.timeout(self._frame_timeout):
                return frames.decode_body(await reader.readexactly(length))
        except asyncio.IncompleteReadError:
            return None
        except TimeoutError:
            raise ProtocolError(f"a frame must be whole within {self._frame_timeout:g} s") from None

    def _hello(self, transport: asyncio.Transport, peer: Peer, frame: dict[str, Any]) -> Connection:
        """A client's first frame. Raises `ProtocolError`."""
        who = Identity.from_hello(frame)
        if self._settings is not None:
            who.check_trust(self._settings)
        if not self._open:
            self._notices.renew()
        connection = Connection(next(self.ids), transport, who, peer.pid, came=self._notices.since(0)[1])
        self._open[connection.id] = connection
        about = {"version": kcoord.__version__, "pid": os.getpid(), "id": self._agent}
        self._send(connection, {"op": "welcome", **about})
        return connection

    def _said(self, connection: Connection, frame: dict[str, Any]) -> None:
        """Any other frame of a client. Raises `ProtocolError`."""
        if self._ending:
            connection.transport.close()
            return
        request, message = parse_request(frame)
        if request in connection.unanswered:
            raise ProtocolError(f"the request {request} of this connection is not answered yet")
        connection.unanswered[request] = message, time.monotonic()
        self._asked(connection, request, message)

    def _lost(self, connection: Connection) -> None:
        if connection.watch is not None:
            connection.watch.close()
        self._left(connection)

    def _ended(self, connection: Connection) -> None:
        """The client's process has ended. Close our end: a forked child may keep the other one open."""
        self._left(connection)
        asyncio.get_running_loop().call_later(_LINGER, connection.transport.abort)

    def _left(self, connection: Connection) -> None:
        if self._open.pop(connection.id, None) is not None and not self._ending:
            self._gone(connection)


async def _readable(client: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(client, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(client)


async def _stream(client: socket.socket, first: bytes) -> tuple[asyncio.StreamReader, asyncio.Transport]:
    """The stream of a client whose bytes `first` were received already."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    reader.feed_data(first)
    transport, _ = await loop.connect_accepted_socket(lambda: asyncio.StreamReaderProtocol(reader), client)
    return reader, transport


def _refuse(transport: asyncio.WriteTransport, error: ProtocolError) -> None:
    log.info("refused a client: %s", error)
    if not transport.is_closing():
        transport.write(frames.encode_frame({"op": "refused", "why": str(error)}))
        transport.close()
