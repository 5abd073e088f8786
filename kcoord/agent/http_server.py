"""The agent's HTTP services: metrics and the status page, each a WSGI application that threads of its own serve.

No claim waits for a client of them, and none can fail the agent. A port that is in use is one notice, and is tried again now and
then: an earlier agent may still be ending.
"""

from __future__ import annotations

import errno
import io
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kcoord.telemetry.events import Notices

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
"""A WSGI application."""

log = logging.getLogger("kcoord.http")

_MOST_AT_ONCE = 16  # connections; the next one is closed
_LONGEST = 5.0  # seconds of a connection
_BREATHER = 0.2  # seconds
_FIRST_RETRY, _SLOWEST_RETRY = 1.0, 60.0  # seconds


class HttpService:
    """Serves `application` at `address`, ``host:port``, until the process ends. Never blocks, never raises.

    `what` it serves, and the `setting` that has its address, are for the notices.
    """

    def __init__(self, what: str, setting: str, address: str, application: Application, notices: Notices) -> None:
        self.bound: str | None = None
        """``host:port`` where it is served; None while it is not."""
        host, _, port = address.rpartition(":")
        self._what, self._application, self._notices = what, application, notices
        self._host, self._port, self._address = host.strip("[]"), int(port), f"{setting}={address}"
        threading.Thread(target=self._serve, name=what, daemon=True).start()

    def _serve(self) -> None:
        pause = _FIRST_RETRY
        while True:
            try:
                server = BoundedServer(self._host, self._port, self._application)
                break
            except (OSError, UnicodeError) as error:  # UnicodeError: the host is no name
                taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
                why = (
                    "another program, perhaps an agent, has it"
                    if taken
                    else f"{error}: it must be an address of this host"
                )
                self._notices.tell(
                    f"no {self._what}: cannot listen at {self._address}: {why}; everything else goes on",
                    about=self._what,
                )
                time.sleep(pause)
                pause = min(2 * pause, _SLOWEST_RETRY)
        host, port = server.server_address[:2]
        self.bound = f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"
        log.info("%s at http://%s", self._what, self.bound)
        server.serve_forever()


class BoundedServer(socketserver.ThreadingMixIn, WSGIServer):
    """Listens at ``host:port``, with bounds on the number of connections and on the seconds of each, so that slow clients
    do not keep others out. Raises OSError, also for a host that cannot be resolved.
    """

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, host: str, port: int, application: Application, longest: float = _LONGEST) -> None:
        """`longest`: seconds of a connection."""
        self._longest = longest
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, address = found[0][0], found[0][4]
        self._room = threading.BoundedSemaphore(_MOST_AT_ONCE)
        super().__init__((str(address[0]), int(address[1])), _Request)
        self.set_app(
            lambda environ, start: application(environ, lambda s, found: start(s, [*found, ("Server", "kcoord")]))
        )

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's would ask the DNS for our name
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            # too many open files: the connection stays in the queue; without a pause the loop would use a whole core
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
        ends = threading.Timer(self._longest, _cut, [request])
        ends.daemon = True
        try:
            ends.start()
            super().process_request_thread(request, client_address)
        finally:
            ends.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a request by %s failed", client_address, exc_info=True)


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):  # its client has closed it
        connection.shutdown(socket.SHUT_RDWR)


class _Request(WSGIRequestHandler):
    def version_string(self) -> str:
        return "kcoord"

    def get_stderr(self) -> Any:
        return io.StringIO()  # a request that breaks off is no traceback in the agent's log

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)
