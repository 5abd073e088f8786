"""One connection for all commands of an agent. Commands of one turn of the event loop travel in one write, as in rueidis.

redis-py's own client takes a connection of a pool for each command, and its pipelines are made by the caller. A server pays for
each connection with memory and for each read with a system call: many keys at once cost an agent one round trip here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from kcoord.leases.base import ended, within
from kcoord.leases.redis_client import BROKEN, COMMAND_TIMEOUT, is_of_another_master

_Command = tuple[tuple[Any, ...], "asyncio.Future[Any]"]


class Pipeline:
    """Commands to the server that `connect` connects to; `broke` is called when a connection ends that commands were sent on.

    Whatever ends a connection fails all commands that are in flight on it; the next command gets a new one. So does a server that
    says that another one is the master.
    """

    def __init__(self, connect: Callable[[], Awaitable[Any]], broke: Callable[[], object] = lambda: None) -> None:
        self._connect, self._broke = connect, broke
        self._wire: _Wire | None = None
        self._unsent: list[_Command] = []
        self._writer: asyncio.Task[None] | None = None

    async def ask(self, *command: Any) -> Any:
        """The server's answer. Raises redis-py's errors, for an answer within `COMMAND_TIMEOUT` after it was sent.

        If this is cancelled, the server may carry the command out all the same.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unsent.append((command, answer))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        return await answer

    def drop(self) -> None:
        """End the connection, if there is one."""
        if self._wire is not None:
            self._end(self._wire, RedisConnectionError("Connection closed by its user"))

    async def close(self) -> None:
        """Close the connection. What is in flight fails."""
        if self._writer is not None:
            await ended({self._writer})  # it may just have connected
        wire, self._wire = self._wire, None
        if wire is not None and wire.reader is not None:
            await ended({wire.reader})
        for _, answer in self._unsent:
            _fail(answer, RedisConnectionError("Connection closed by its user"))
        if wire is not None:
            with suppress(*BROKEN):
                await within(COMMAND_TIMEOUT, wire.connection.disconnect())

    async def _write(self) -> None:
        """Send what has been asked, in one write each time, until nothing is left."""
        while self._unsent:
            batch: list[_Command] = []
            wire: _Wire | None = None
            error: BaseException | None = RedisConnectionError("Connection closed before it was used")
            try:
                wire = self._wire
                if wire is None or not wire.unanswered:
                    wire = None
                    wire = await within(2 * COMMAND_TIMEOUT, self._living())
                batch, self._unsent = [each for each in self._unsent if not each[1].done()], []
                await wire.send(batch)
                error = None
            except BROKEN as broken:
                error = broken
            finally:
                if error is not None:
                    if wire is not None:
                        self._end(wire, error)
                    else:
                        batch, self._unsent = self._unsent, []
                    for _, answer in batch:
                        _fail(answer, error)

    async def _living(self) -> _Wire:
        """The connection, or a new one. One that has something to read before it was asked is dead, or says what nobody wants."""
        if self._wire is not None:
            with suppress(*BROKEN):
                if not await _has_something(self._wire.connection):
                    return self._wire
            idle, self._wire = self._wire, None  # nothing was lost: a server may close what is idle
            idle.end(RedisConnectionError("Connection closed while it was idle"))
        self._wire = _Wire(await self._connect(), self._end)
        return self._wire

    def _end(self, wire: _Wire, error: BaseException) -> None:
        if self._wire is wire:
            self._wire = None
            self._broke()
        wire.end(error)


class _Wire:
    """A connection, and the commands that are in flight on it.

    Invariant: `unanswered` has a future for each command that was sent and whose answer has not been read, in the order of both.
    What breaks it (a time-out, half a write, an answer that cannot be read) ends the connection, by ``broke(wire, error)``. So
    does an answer that leads to another server.
    """

    def __init__(self, connection: Any, broke: Callable[[_Wire, BaseException], None]) -> None:
        self.connection, self._broke = connection, broke
        self.unanswered: deque[asyncio.Future[Any]] = deque()
        self.reader: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def send(self, batch: list[_Command]) -> None:
        if not batch:
            return
        packed = self.connection.pack_commands([command for command, _ in batch])
        self.unanswered.extend(answer for _, answer in batch)
        if self.reader is None or self.reader.done():
            self.reader = asyncio.create_task(self._read())
        try:
            await self.connection.send_packed_command(packed, check_health=False)
        except (
            AttributeError
        ) as error:  # before Python 3.12, a connection's streams may be taken away while one writes to them
            raise RedisConnectionError("Connection lost in mid-command") from error

    async def _read(self) -> None:
        """Read the answers until none is missing. A server that sends none for `COMMAND_TIMEOUT` has failed all commands."""
        error: BaseException = RedisConnectionError("Connection closed in mid-command")
        moved = False
        try:
            while self.unanswered:
                try:
                    reply, refusal = await self.connection.read_response(disconnect_on_error=False), None
                except ResponseError as error_reply:
                    reply, refusal = None, error_reply
                if not self.unanswered:
                    return  # ended meanwhile
                answer = self.unanswered.popleft()
                if refusal is not None:
                    _fail(answer, refusal)
                    if moved := is_of_another_master(refusal):
                        error = refusal
                        break
                elif not answer.done():
                    answer.set_result(reply)
        except BROKEN as broken:
            error = broken
        finally:
            if self.unanswered or moved:
                self._broke(self, error)

    def end(self, error: BaseException) -> None:
        """Close the connection, and fail what is in flight."""
        while self.unanswered:
            _fail(self.unanswered.popleft(), error)
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        with suppress(*BROKEN):
            await self.connection.disconnect(nowait=True)


async def _has_something(connection: Any) -> bool:
    """True if there is something to read, or the other side has closed it."""
    can_read = (
        getattr(connection, "can_read", None) or connection.can_read_destructive
    )  # redis-py 8 has another name for it
    return bool(await can_read())


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # seen, also if nobody waits any more
