"""The agent's status as a live page: the same data as `kcoord status --json`, and nothing for a page of the web to read."""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import platform
import re
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kcoord.agent.http_server import BoundedServer
from kcoord.agent.status_page import StatusPage
from kcoord.keys.cache_key import CacheKey
from kcoord.protocol import messages
from kcoord.rank.client import Lead
from kcoord.telemetry.figures import Figures
from tests.support.agents import SOON, Node, hits, until
from tests.support.browser import Browser
from tests.support.command import KCOORD
from tests.support.sandbox import Sandbox, finish

HOSTILE = "</script><script>document.title='mine'</script><img src=x onerror=alert(1)>"
STATUS: dict[str, Any] = {
    "agent": "a", "pid": 7, "version": "1", "started": 0.0, "coordinates": "Redis", "clients": 3, "uploads": 0, "leases": 1,
    "breaker": [], "notices": [f"a notice {HOSTILE}"], "settings": {"redis_url": "rediss://:***@host"},
    "store": {"root": "/store", "usable": False},
    "flights": [{"key": "ab" * 32, "name": f"triton:{HOSTILE}", "state": "compiling",
                 "leader": "rank 3", "seconds": 1.5, "waiting": ["rank 1"]}],
    "packs": {"job": {"artifacts": 1300, "file": "f.pack"}},
    "pools": {"job": {"running": True, "busy": ["kernels.matmul"], "queued": 5, "compiled": 4, "used": 3, "failed": 1,
                      "failures": ["no registers"]}},
    "jobs": {"job": {**Figures().read(), "requests": 1234, "compiles": 12}},
}  # fmt: skip


def page_of_a_status() -> StatusPage:
    """A page whose agent was well a moment ago."""
    page = StatusPage("127.0.0.1", stale=60.0)
    page.look(STATUS)
    return page


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a page without an agent."""
    server = BoundedServer("127.0.0.1", 0, page_of_a_status())
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(
    address: str, path: str = "/status.json", method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(address, timeout=SOON)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_a_real_agent_serves_its_status_without_its_settings() -> None:
    with Node(page="0") as node:
        node.start()
        client, key = node.client(job="mine"), CacheKey.of("test", "matmul")
        lead = client.claim(key, node.home("matmul"))
        assert client.ask(messages.Deliver([hits(5)]), messages.Done, start=False)
        until(lambda: node.status()["page"])
        address = node.status()["page"]
        until(lambda: (found := json.loads(ask(address)[2]))["jobs"] and found["flights"])
        found, status = json.loads(ask(address)[2]), node.status()
        assert found.keys() == status.keys() - {"settings", "op", "id"} | {"now"}
        assert [flight["name"] for flight in found["flights"]] == ["test:matmul"]
        assert found["jobs"] == status["jobs"]
        assert found["jobs"]["mine"]["memory_hits"] == 5
        assert isinstance(lead, Lead)
        client.give_up(lead, key)


def test_without_the_setting_there_is_no_page() -> None:
    with Node() as node:
        node.start()
        assert node.status()["page"] is None


@pytest.mark.parametrize("program", [["exec"], ["agent"]], ids=" ".join)
def test_it_is_a_flag_of_the_agent_and_of_whoever_starts_one(sandbox: Sandbox, program: list[str]) -> None:
    if program == ["agent"]:
        done = finish(sandbox.start(*KCOORD, "agent", "--page", "nowhere"))
        assert done.returncode == 2
        assert done.stderr.startswith("kcoord: --page=")
        return
    status = shlex.join([sys.executable, *KCOORD, "status"])
    until_it_is_there = ["bash", "-c", f"until {status} | grep page; do :; done"]
    done = finish(sandbox.start(*KCOORD, "exec", "--page", "0", "--", *until_it_is_there))
    assert re.search(r"page: http://127\.0\.0\.1:\d+/", done.stdout), done.stdout + done.stderr


@pytest.mark.parametrize(
    "host", ["localhost:80", "LOCALHOST", "127.0.0.1:1", "10.1.2.3", "[::1]:9465", platform.node()]
)
def test_an_address_and_this_nodes_names_are_answered(address: str, host: str) -> None:
    assert ask(address, host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:9465", "127.0.0.1.evil.example", "localhost.evil.example", "", "::1]", "a" * 5000],
)
def test_a_name_that_somebody_else_may_point_here_is_refused(address: str, host: str) -> None:
    for path in ("/", "/status.json"):
        code, _, text = ask(address, path, host=host)
        assert code == 403
        assert "triton" not in text


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [("POST", "/", 405), ("DELETE", "/status.json", 405), ("HEAD", "/", 200), ("GET", "/metrics", 404)],
)
def test_it_is_only_read(address: str, method: str, path: str, code: int) -> None:
    found, _, text = ask(address, path, method)
    assert found == code
    assert method != "HEAD" or not text


def test_its_own_policy_lets_nothing_else_run_or_load(address: str) -> None:
    _, headers, text = ask(address, "/")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert HOSTILE not in text, "a kernel's name ends no script"
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text.replace("img src=x", ""))
    assert "redis_url" not in text


def test_an_agent_that_hangs_or_has_not_begun_is_an_error_and_not_an_old_status() -> None:
    page = StatusPage("localhost", stale=0.0)
    for _ in range(2):
        said: list[str] = []
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/status.json", "HTTP_HOST": "localhost"}
        assert b"".join(page(environ, lambda status, headers, said=said: said.append(status)))
        assert said == ["503 Service Unavailable"]
        page.look(STATUS)


def test_a_browser_shows_what_ranks_sent_as_text_and_nothing_else(address: str) -> None:
    shown = Browser().dom(f"http://{address}/", after=2.5)
    text = html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"<script.*?</script>", "", shown, flags=re.DOTALL)))
    for each in (
        f"triton:{HOSTILE}",
        "rank 3",
        "1: rank 1",
        "abababababab",
        "not usable",
        "1,234",
        "1,300",
        "no registers",
        "live",
    ):
        assert each in text, each
    assert "mine</title>" not in shown
    assert 'class="gone"' not in shown


def test_clients_that_drip_bytes_keep_nobody_out_for_longer_than_a_connection_lasts() -> None:
    server = BoundedServer("127.0.0.1", 0, page_of_a_status(), longest=1.0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    address, ends = f"127.0.0.1:{server.server_address[1]}", threading.Event()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(server.server_address[:2], SOON)) for _ in range(16)]

        def drip() -> None:
            while not ends.wait(0.02):
                for each in slow:
                    with contextlib.suppress(OSError):  # the server has closed it
                        each.send(b"G")

        dripping = threading.Thread(target=drip)
        dripping.start()

        def answered() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return ask(address)[0] == 200
            return False

        try:
            until(answered)
        finally:
            ends.set()
            dripping.join()
            server.shutdown()
            thread.join()
            server.server_close()


def test_a_browser_says_that_the_agent_has_gone() -> None:
    browser = Browser()
    server = BoundedServer("127.0.0.1", 0, page_of_a_status())

    def serve_once() -> None:
        server.handle_request()
        server.server_close()

    thread = threading.Thread(target=serve_once)
    thread.start()
    shown = browser.dom(f"http://127.0.0.1:{server.server_address[1]}/", after=3)
    thread.join()
    assert '<body class="gone">' in shown
    assert "the agent has gone" in shown
    assert "abababababab" in shown, "the latest status stays"
