"""An HTTP server with a bound on connections: clients that are too many, or say nothing, take a few threads at most."""

from __future__ import annotations

import io
import logging
import socket
import socketserver
import threading
import time
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kcoord.agent.http_service import Application

log = logging.getLogger("kcoord.http")

_MOST_AT_ONCE = 4  # requests; the next one's connection is closed
_SLOWEST = 10.0  # seconds between two bytes of a client
_BREATHER = 0.2  # seconds


class BoundedServer(socketserver.ThreadingMixIn, WSGIServer):
    """Listens at ``host:port``. Raises OSError, also for a host that cannot be resolved."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, host: str, port: int, application: Application) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], found[0][4]
        self._room = threading.BoundedSemaphore(_MOST_AT_ONCE)
        super().__init__((str(address[0]), int(address[1])), _Request)
        self.set_app(application)

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's would ask the DNS for our name
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            # too many open files: the connection stays in the queue, and a loop without a pause would take a core
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
            log.info("a request is not answered: %s", error)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a request by %s failed", client_address, exc_info=True)


class _Request(WSGIRequestHandler):
    timeout = _SLOWEST

    def version_string(self) -> str:
        return "kcoord"

    def get_stderr(self) -> Any:
        return io.StringIO()  # a request that breaks off is no traceback in the agent's log

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
