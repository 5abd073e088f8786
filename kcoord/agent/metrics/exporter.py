"""The agent's metrics over HTTP: ``GET /metrics`` and nothing else, at KCOORD_METRICS.

In threads of its own: no claim waits for a scrape, and no client of this port can fail the agent. A page is made at most once a
second, however often it is asked for, and of what the agent's pulse left behind: a scrape touches nothing that claims use but the
tally's lock, for microseconds. A port that cannot be had is told once, and tried again now and then: an agent before this one may
still be ending. Not guaranteed: any secrecy. Whoever reaches the port reads the page, which names no kernel, job or path.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kcoord.agent.metrics.prometheus import (
    CONTENT_TYPE,
    Labels,
    Page,
    Tally,
)
from kcoord.telemetry.events import Notices

log = logging.getLogger("kcoord.metrics")

_FRESH = 1.0  # seconds that a page is served again
_MOST_AT_ONCE = 4  # scrapes; the next one's connection is closed
_SLOWEST = 10.0  # seconds between two bytes of a client
_FIRST_RETRY, _SLOWEST_RETRY = 1.0, 60.0  # seconds
_BREATHER = 0.2  # seconds


class Exporter:
    """Serves one agent's metrics at `address`, ``host:port``, until the process ends. `begin` never blocks and never raises."""

    def __init__(self, address: str, notices: Notices) -> None:
        self.tally = Tally()
        self.vitals: Mapping[tuple[str, Labels], float] = {}
        """What is true now; the agent's pulse replaces it, and never changes one that it has set."""
        self.bound: str | None = None
        """``host:port`` where it is served; None while it is not."""
        host, _, port = address.rpartition(":")
        self._host, self._port, self._notices = host.strip("[]"), int(port), notices

    def begin(self) -> None:
        threading.Thread(target=self._serve, name="metrics", daemon=True).start()

    def _serve(self) -> None:
        try:
            page = _Cached(Page(self.tally, lambda: self.vitals))
        except ImportError as error:
            self._notices.tell(f"no metrics: {error}: pip install prometheus-client")
            return
        pause = _FIRST_RETRY
        while True:
            try:
                server = _Server(self._host, self._port, page)
                break
            except (OSError, UnicodeError) as error:  # a name that is none, too
                self._notices.tell(
                    f"no metrics: cannot listen at KCOORD_METRICS={self._host}:{self._port}: {error}: another agent of this "
                    "node may have it; everything else goes on",
                    about="metrics",
                )
                time.sleep(pause)
                pause = min(2 * pause, _SLOWEST_RETRY)
        host, port = server.server_address[:2]
        self.bound = f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"
        log.info("metrics at http://%s/metrics", self.bound)
        server.serve_forever()


class _Cached:
    """A page that is at most `_FRESH` seconds old."""

    def __init__(self, page: Page) -> None:
        self._page, self._lock = page, threading.Lock()  # one scrape makes it, and the others wait for that
        self._text, self._until = b"", 0.0

    def text(self) -> bytes:
        with self._lock:
            if time.monotonic() >= self._until:
                self._text = self._page.render()
                self._until = time.monotonic() + _FRESH
            return self._text


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16

    def __init__(self, host: str, port: int, page: _Cached) -> None:
        """Raises OSError, which a name that cannot be resolved is too."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], found[0][4]
        self.page = page
        self._room = threading.BoundedSemaphore(_MOST_AT_ONCE)
        super().__init__((str(address[0]), int(address[1])), _Scrape)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's would ask the DNS for our name

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:  # no file can be opened: who connected waits on, and would be looked for without end
            time.sleep(_BREATHER)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError as error:  # no thread could be started
            self._room.release()
            log.info("a scrape is not answered: %s", error)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a scrape by %s failed", client_address, exc_info=True)


class _Scrape(BaseHTTPRequestHandler):
    timeout = _SLOWEST
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self._plain(404, b"there is only /metrics\n")
            return
        text = self.server.page.text()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _refused(self) -> None:
        self._plain(405, b"" if self.command == "HEAD" else b"there is only GET\n")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refused

    def _plain(self, status: int, text: bytes) -> None:
        self.send_response(status)
        if status == 405:
            self.send_header("Allow", "GET")
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def version_string(self) -> str:
        return "kcoord"

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
