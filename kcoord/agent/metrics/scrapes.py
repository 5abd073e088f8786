"""The HTTP server of scrapes: prometheus-client's, with a page that is kept for a second and a bound on connections."""

from __future__ import annotations

import io
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client.exposition import ThreadingWSGIServer

from kcoord.agent.metrics.prometheus import CONTENT_TYPE, Page, Samples, Tally

log = logging.getLogger("kcoord.metrics")

_FRESH = 1.0  # seconds that a page is served again
_MOST_AT_ONCE = 4  # scrapes; the next one's connection is closed
_SLOWEST = 10.0  # seconds between two bytes of a client
_BREATHER = 0.2  # seconds
_KNOWN_METHODS = frozenset({"HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class ScrapeServer(ThreadingWSGIServer):
    """Listens at ``host:port``. Raises OSError, also for a host that cannot be resolved."""

    request_queue_size = 16

    def __init__(self, host: str, port: int, tally: Tally, vitals: Callable[[], Samples]) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], found[0][4]
        self._room = threading.BoundedSemaphore(_MOST_AT_ONCE)
        super().__init__((str(address[0]), int(address[1])), _Scrape)
        self.set_app(_Application(Page(tally, vitals)))

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's would ask the DNS for our name
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except (
            OSError
        ):  # too many open files: the connection stays in the queue, and a loop without a pause would take a core
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


class _Application:
    """The WSGI application: a page that is at most `_FRESH` seconds old."""

    def __init__(self, page: Page) -> None:
        self._page, self._lock = page, threading.Lock()  # one scrape renders the page, and the others wait for it
        self._text, self._until = b"", 0.0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, headers, kind = environ["REQUEST_METHOD"], [("Server", "kcoord")], "text/plain"
        if method != "GET":
            status = "405 Method Not Allowed" if method in _KNOWN_METHODS else "501 Not Implemented"
            text = b"" if method == "HEAD" else b"there is only GET\n"
            headers.append(("Allow", "GET"))
        elif environ["PATH_INFO"] != "/metrics":
            status, text = "404 Not Found", b"there is only /metrics\n"
        else:
            status, text, kind = "200 OK", self._fresh(), CONTENT_TYPE
        start_response(status, [*headers, ("Content-Type", kind), ("Content-Length", str(len(text)))])
        return [text]

    def _fresh(self) -> bytes:
        with self._lock:
            if time.monotonic() >= self._until:
                self._text = self._page.render()
                self._until = time.monotonic() + _FRESH
            return self._text


class _Scrape(WSGIRequestHandler):
    timeout = _SLOWEST

    def version_string(self) -> str:
        return "kcoord"

    def get_stderr(self) -> Any:
        return io.StringIO()  # a scrape that breaks off is no traceback in the agent's log

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
