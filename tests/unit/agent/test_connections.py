"""The bytes of the agent's clients: how they become requests, and how a connection ends."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kcoord.agent.connections import Connection, Connections
from kcoord.protocol import frames, messages
from kcoord.protocol.identity import Identity
from kcoord.telemetry.events import Notices

HELLO = frames.encode_frame(Identity(os.getpid(), None, None, "wire").hello())


def status(number: int) -> bytes:
    return frames.encode_frame({"op": "status", "id": number})


@dataclass
class Clients:
    """An agent's connections, whose requests are answered with their number unless `handle` does something else."""

    path: Path
    handle: Callable[[Connection, int], None] | None = None
    asked: list[int] = field(default_factory=list)
    gone: list[Connection] = field(default_factory=list)
    hello_timeout: float = 10.0

    def __post_init__(self) -> None:
        self.there = Connections("agent", Notices(), False, hello_timeout=self.hello_timeout)

    def _ask(self, connection: Connection, request: int, message: messages.Request) -> None:
        self.asked.append(request)
        if self.handle is not None:
            self.handle(connection, request)
        else:
            self.there.answer(connection, request, messages.Facts({"number": request}))

    @asynccontextmanager
    async def client(self, hello: bytes = HELLO) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(hello)
        if hello:
            assert (await frame(reader))["op"] == "welcome"
        yield reader, writer
        writer.close()


async def frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    length = frames.frame_length(await reader.readexactly(frames.HEADER_BYTES))
    return frames.decode_body(await reader.readexactly(length))


def serving(
    path: Path, scenario: Callable[[Clients], Coroutine[Any, Any, None]], hello_timeout: float = 10.0
) -> Clients:
    clients = Clients(path / "s", hello_timeout=hello_timeout)

    async def run() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(clients.path))
            close = clients.there.listen(listener, clients._ask, clients.gone.append)
            await scenario(clients)
            while len(clients.there):
                await asyncio.sleep(0.005)
            close()

    asyncio.run(asyncio.wait_for(run(), 30))
    return clients


def test_a_request_that_arrives_byte_by_byte_is_one_request(tmp_path: Path) -> None:
    async def scenario(clients: Clients) -> None:
        async with clients.client() as (reader, writer):
            for byte in status(7):
                writer.write(bytes([byte]))
                await asyncio.sleep(0)
            assert (await frame(reader))["number"] == 7

    assert serving(tmp_path, scenario).asked == [7]


def test_requests_of_one_write_are_asked_in_order_and_the_rest_of_a_frame_later(tmp_path: Path) -> None:
    async def scenario(clients: Clients) -> None:
        async with clients.client() as (reader, writer):
            writer.write(b"".join(map(status, range(1, 6))) + status(6)[:-3])
            assert [(await frame(reader))["number"] for _ in range(5)] == [1, 2, 3, 4, 5]
            writer.write(status(6)[-3:])
            assert (await frame(reader))["number"] == 6

    assert serving(tmp_path, scenario).asked == [1, 2, 3, 4, 5, 6]


def test_a_hello_and_requests_may_come_together(tmp_path: Path) -> None:
    async def scenario(clients: Clients) -> None:
        async with clients.client(HELLO + status(1)) as (reader, _):
            assert (await frame(reader))["number"] == 1

    serving(tmp_path, scenario)


def test_who_says_nothing_is_cut_off(tmp_path: Path) -> None:
    async def scenario(clients: Clients) -> None:
        async with clients.client(b"") as (silent, _), clients.client() as (reader, writer):
            assert await silent.read() == b""
            await asyncio.sleep(0.15)  # longer than a hello may take: after it a client may be silent
            writer.write(status(1))
            assert (await frame(reader))["number"] == 1

    serving(tmp_path, scenario, hello_timeout=0.1)


def test_half_a_hello_is_cut_off_too(tmp_path: Path) -> None:
    async def scenario(clients: Clients) -> None:
        async with clients.client(b"") as (reader, writer):
            writer.write(HELLO[:-1])
            assert await reader.read() == b""

    assert not serving(tmp_path, scenario, hello_timeout=0.1).gone


def test_who_ends_its_sending_is_answered_what_it_had_asked(tmp_path: Path) -> None:
    async def scenario(clients: Clients) -> None:
        async with clients.client() as (reader, writer):
            writer.write(status(1) + status(2))
            writer.write_eof()
            assert [(await frame(reader))["number"] for _ in range(2)] == [1, 2]
            assert await reader.read() == b""

    assert len(serving(tmp_path, scenario).gone) == 1


def test_what_a_client_had_sent_before_it_ended_is_asked_all_the_same(tmp_path: Path) -> None:
    async def scenario(clients: Clients) -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(clients.path))
            client.sendall(HELLO + status(1) + status(2) + status(3))
        while not clients.gone:
            await asyncio.sleep(0.005)

    assert serving(tmp_path, scenario).asked == [1, 2, 3]


@pytest.mark.parametrize("ends", [b"", b"\xff\xff\xff\xff"], ids=["ends its sending", "sends nonsense"])
def test_who_reads_no_answers_and_ends_is_gone_at_once(tmp_path: Path, ends: bytes) -> None:
    """Else what it leads would be waited for until its process ends."""

    async def scenario(clients: Clients) -> None:
        clients.handle = lambda connection, request: clients.there.answer(
            connection, request, messages.Facts({"much": "y" * 2_000_000})
        )
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(clients.path))
            client.sendall(HELLO + status(1))
            while not clients.asked:
                await asyncio.sleep(0.005)
            if ends:
                client.sendall(ends)
            else:
                client.shutdown(socket.SHUT_WR)
            while not clients.gone:
                await asyncio.sleep(0.005)

    assert len(serving(tmp_path, scenario).gone) == 1


def test_after_nonsense_nothing_more_of_that_client_is_read(tmp_path: Path) -> None:
    async def scenario(clients: Clients) -> None:
        async with clients.client() as (reader, writer):
            writer.write(status(1) + frames.encode_frame({"op": "nonsense", "id": 2}) + status(3))
            assert (await frame(reader))["number"] == 1
            assert (await frame(reader))["op"] == "refused"
            assert await reader.read() == b""

    clients = serving(tmp_path, scenario)
    assert clients.asked == [1]
    assert len(clients.gone) == 1


def test_an_error_that_nobody_foresaw_ends_its_connection_and_no_other(tmp_path: Path) -> None:
    told: list[object] = []

    async def scenario(clients: Clients) -> None:
        def ill(connection: Connection, request: int) -> None:
            raise ZeroDivisionError("handler")

        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
        async with clients.client() as (reader, writer), clients.client() as (other, to_other):
            clients.handle = ill
            writer.write(status(1) + status(2))
            assert await reader.read() == b""
            clients.handle = None
            to_other.write(status(3))
            assert (await frame(other))["number"] == 3

    clients = serving(tmp_path, scenario)
    assert clients.asked == [1, 3]
    assert len(clients.gone) == 2
    assert [type(error) for error in told] == [ZeroDivisionError]


def test_a_client_that_leaves_is_gone_once(tmp_path: Path) -> None:
    async def scenario(clients: Clients) -> None:
        async with clients.client() as (_, writer):
            writer.transport.abort()

    assert len(serving(tmp_path, scenario).gone) == 1


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.parametrize(
    "says",
    [HELLO, HELLO[:-1], frames.encode_frame({"op": "nonsense"})],
    ids=["a hello", "half a hello", "something else"],
)
def test_descriptors_of_all_kinds_that_a_client_sends_are_closed_with_it(tmp_path: Path, says: bytes) -> None:
    async def scenario(clients: Clients) -> None:
        loop, before = asyncio.get_running_loop(), descriptors()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(clients.path))
            with open("/dev/null") as file, open("/proc/self/stat") as stat:  # noqa: ASYNC230, PTH123
                socket.send_fds(client, [says], [file.fileno(), stat.fileno(), 0, 1, 2])
                client.setblocking(False)
                if says == HELLO:
                    assert frames.decode_body((await loop.sock_recv(client, 1 << 16))[4:])["op"] == "welcome"
                    socket.send_fds(client, [status(1)], [file.fileno()])  # later ones are not looked at
                    assert await loop.sock_recv(client, 1 << 16)
        while descriptors() > before:
            await asyncio.sleep(0.005)

    serving(tmp_path, scenario)
