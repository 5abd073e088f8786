"""The Redis of the manifests, started with their arguments and their ACL file: kcoord can do all that it does, and no more."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import LeaseService, probe
from kcoord.leases.redis import RedisLeases
from kcoord.testing.leases import LeaseConformance
from tests.cluster.k8s.manifests import objects, pods
from tests.support.redis_server import RedisServer, find_redis_server


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url, protocol=2) as found:
        yield found


class TestLeases(LeaseConformance):
    """All that a lease service does, as the user of the ACL file."""

    @pytest.fixture(autouse=True)
    def _url(self, url: str) -> None:
        self.url = url

    @asynccontextmanager
    async def open_service(self, **times: float) -> AsyncIterator[LeaseService]:
        service = RedisLeases(self.url, uuid.uuid4().hex, **times)
        yield service
        await service.close()


@pytest.mark.parametrize(
    "command",
    ["FLUSHALL", "FLUSHDB", "KEYS *", "SCAN 0", "CONFIG GET *", "CONFIG SET maxmemory 0", "ACL LIST", "ACL WHOAMI", "SHUTDOWN",
     "DEBUG SLEEP 1", "CLIENT LIST", "CLIENT KILL TYPE normal", "MONITOR", "SAVE", "INFO", "SCRIPT FLUSH", "SCRIPT KILL",
     "REPLICAOF 127.0.0.1 1", "MODULE LIST", "RENAME kcoord:a kcoord:b", "DUMP kcoord:a",
     "MIGRATE 127.0.0.1 1 kcoord:a 0 1", "PSUBSCRIBE *", "DBSIZE", "SELECT 1"],
)  # fmt: skip
def test_nothing_else_may_be_said(client: redis.Redis, command: str) -> None:
    with pytest.raises(redis.exceptions.ResponseError, match=r"permission|not allowed"):
        client.execute_command(*command.split())


def test_keys_and_channels_of_others_are_out_of_reach(client: redis.Redis) -> None:
    client.hset("kcoord:mine", "a", "1")
    assert client.hgetall("kcoord:mine") == {b"a": b"1"}
    for command in (
        "HSET theirs a 1",
        "SET theirs 1",
        "GET theirs",
        "HGETALL theirs",
        "DEL theirs",
        "EXPIRE theirs 1",
        "PUBLISH theirs x",
        "SUBSCRIBE theirs",
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())
    for script in (
        "return redis.call('FLUSHALL')",
        "return redis.call('HGETALL', 'theirs')",
        "return redis.call('KEYS', '*')",
    ):
        with pytest.raises(redis.exceptions.ResponseError):
            client.eval(script, 0)
    assert client.hgetall("kcoord:mine") == {b"a": b"1"}


async def test_nobody_gets_in_without_the_password(server: RedisServer, url: str) -> None:
    assert server.command("PING").startswith(b"-NOAUTH")
    for wrong in (url.replace("kcoord:", "kcoord:x", 1), url.replace("kcoord:", "default:", 1)):
        with redis.Redis.from_url(wrong, protocol=2) as client, pytest.raises(redis.exceptions.AuthenticationError):
            client.ping()
    service = RedisLeases(f"redis://127.0.0.1:{server.port}/0", "default", ttl=30.0, limit=300.0, failure_ttl=30.0)
    with pytest.raises(LeaseUnavailable):
        await probe(service)
    await service.close()


def test_the_probes_tell_a_server_that_answers_from_one_that_does_not(server: RedisServer) -> None:
    binary = find_redis_server()
    assert binary is not None
    cli = Path(binary).with_name("redis-cli")
    if not cli.exists():
        pytest.skip("no redis-cli beside redis-server")
    (redis_pod,) = (pod for pod in pods(objects("base")) if pod.of["kind"] == "Deployment")
    container = redis_pod.spec["containers"][0]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        program, *arguments = container[kind]["exec"]["command"]
        assert program == "redis-cli"
        if "-e" in arguments and b"6.2" in subprocess.run([cli, "--version"], capture_output=True).stdout:
            arguments.remove("-e")  # this one is older than the option
        there = subprocess.run([cli, "-p", str(server.port), *arguments], capture_output=True, timeout=20)
        assert (there.returncode, there.stdout) == (0, b"PONG\n")
    gone = subprocess.run([cli, "-p", "1", *arguments], capture_output=True, timeout=20)
    assert gone.returncode != 0


def test_the_probes_user_can_do_nothing_but_ping(server: RedisServer) -> None:
    with redis.Redis(port=server.port, username="probe", password="none", protocol=2) as client:
        assert client.ping()
        for command in ("HGETALL kcoord:mine", "EVAL 'return 1' 0", "INFO", "SUBSCRIBE kcoord:x"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.split())
