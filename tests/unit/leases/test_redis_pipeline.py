"""One connection for many commands: each gets its own answer, whatever becomes of the others and of the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from redis.asyncio.connection import Connection
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kcoord.leases.redis import RedisLeases
from kcoord.leases.redis_pipeline import Pipeline
from kcoord.testing.leases import BOUND
from tests.support.redis_server import RedisServer

_PATIENCE = 0.3  # seconds that a command may take
_TIMES = {"ttl": 30.0, "limit": 300.0, "failure_ttl": 30.0}


class _Door:
    """A server that answers ``ECHO n`` with ``:n``, or with what `says` makes of n. `reads` has the commands of each read."""

    def __init__(self, says: Callable[[bytes], bytes] = lambda n: b":" + n + b"\r\n") -> None:
        self._says = says
        self.reads: list[list[bytes]] = []
        self.open: list[asyncio.StreamWriter] = []
        self.let_go = asyncio.Event()  # until then nothing is answered
        self.let_go.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.append(writer)
        try:
            while heard := await reader.read(1 << 20):
                writer.write(b"+OK\r\n" * heard.count(b"SETINFO"))
                numbers = [part.split(b"\r\n")[2] for part in heard.split(b"ECHO")[1:]]
                self.reads += [numbers] if numbers else []
                await self.let_go.wait()
                writer.write(b"".join(map(self._says, numbers)))
        except OSError:
            pass
        finally:
            writer.close()


async def _connected(port: int) -> Connection:
    connection = Connection(host="127.0.0.1", port=port, socket_timeout=_PATIENCE, protocol=2)
    await connection.connect()
    return connection


@asynccontextmanager
async def _to(door: _Door, broke: Callable[[], object] = lambda: None) -> AsyncIterator[Pipeline]:
    server = await asyncio.start_server(door.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pipeline = Pipeline(lambda: _connected(port), broke)
    try:
        yield pipeline
    finally:
        await pipeline.close()
        server.close()
        for writer in door.open:
            writer.transport.abort()
        await asyncio.sleep(0)


async def test_commands_of_one_turn_travel_in_one_write_over_one_connection() -> None:
    door = _Door()
    async with _to(door) as pipeline:
        assert await pipeline.ask("ECHO", 7) == 7
        assert await asyncio.gather(*(pipeline.ask("ECHO", n) for n in range(300))) == list(range(300))
    assert [len(read) for read in door.reads] == [1, 300]
    assert len(door.open) == 1


async def test_an_error_or_a_caller_that_leaves_changes_nobody_else_s_answer() -> None:
    door = _Door(lambda n: b"-ERR no\r\n" if n == b"3" else b":" + n + b"\r\n")
    async with _to(door) as pipeline:
        asked = [asyncio.create_task(pipeline.ask("ECHO", n)) for n in range(9)]
        await asyncio.sleep(0)
        asked[0].cancel()  # it is not sent
        while not door.reads:
            await asyncio.sleep(0)
        asked[5].cancel()  # it is
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), BOUND)
    assert isinstance(answers[3], ResponseError)
    assert [n for n, answer in enumerate(answers) if answer != n] == [0, 3, 5]
    assert len(door.open) == 1


async def test_a_late_answer_is_nobody_s() -> None:
    """The command that it belongs to has timed out: on the same connection it would be the next one's."""
    door, ends = _Door(), []
    async with _to(door, lambda: ends.append(1)) as pipeline:
        assert await pipeline.ask("ECHO", 1) == 1
        door.let_go.clear()
        late = [asyncio.create_task(pipeline.ask("ECHO", n)) for n in (2, 3)]
        for answer in await asyncio.wait_for(asyncio.gather(*late, return_exceptions=True), BOUND):
            assert isinstance(answer, RedisTimeoutError), "all that was in flight has failed"
        door.let_go.set()
        assert await pipeline.ask("ECHO", 4) == 4
    assert len(door.open) == 2
    assert ends == [1]


async def test_a_connection_that_ends_in_mid_command_fails_what_is_in_flight_and_nothing_after_it() -> None:
    door = _Door()
    async with _to(door) as pipeline:
        assert await pipeline.ask("ECHO", 1) == 1
        door.let_go.clear()
        lost = [asyncio.create_task(pipeline.ask("ECHO", n)) for n in (2, 3)]
        while len(door.reads) < 2:
            await asyncio.sleep(0)
        door.open[0].transport.abort()
        assert all(isinstance(answer, RedisError) for answer in await asyncio.gather(*lost, return_exceptions=True))
        door.let_go.set()
        assert await asyncio.gather(*(pipeline.ask("ECHO", n) for n in range(9))) == list(range(9))


async def test_what_nobody_asked_for_is_nobody_s_answer() -> None:
    door = _Door()
    async with _to(door) as pipeline:
        assert await pipeline.ask("ECHO", 1) == 1
        door.open[0].write(b":99\r\n" * 3)
        await asyncio.sleep(_PATIENCE / 3)  # nothing says that it has arrived
        assert await pipeline.ask("ECHO", 2) == 2
    assert len(door.open) == 2


async def test_nobody_waits_for_a_server_that_is_not_there() -> None:
    pipeline = Pipeline(lambda: _connected(1))
    answers = await asyncio.gather(*(pipeline.ask("ECHO", n) for n in range(9)), return_exceptions=True)
    assert all(isinstance(answer, RedisError) for answer in answers)
    await pipeline.close()


@pytest.mark.parametrize("keys", [1, 500])
async def test_an_agent_has_two_connections_however_many_keys_it_asks_for(redis_server: RedisServer, keys: int) -> None:
    service = RedisLeases(redis_server.url, "test", **_TIMES)
    try:
        await asyncio.gather(*(service.acquire(f"{n}", "a", "host") for n in range(keys)))
        async with service.watch("0"):
            with redis_server.session() as command:
                clients = command("CLIENT", "LIST").count(b" addr=") - 1  # that session
    finally:
        await service.close()
    assert clients == 2
