"""An HTTP service of the agent, served by threads of its own: no claim waits for a client of it, and none can fail the agent.

A port that is in use is one notice, and is tried again now and then: an earlier agent may still be ending.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kcoord.telemetry.events import Notices

if TYPE_CHECKING:
    from kcoord.agent.http_server import Application

log = logging.getLogger("kcoord.http")

_FIRST_RETRY, _SLOWEST_RETRY = 1.0, 60.0  # seconds


class Kept:
    """The content that ``make()`` returned at most `seconds` ago. One request makes it, and the others wait for it."""

    def __init__(self, make: Callable[[], bytes], seconds: float) -> None:
        self._make, self._seconds, self._lock = make, seconds, threading.Lock()
        self._content, self._until = b"", 0.0

    def __call__(self) -> bytes:
        with self._lock:
            if time.monotonic() >= self._until:
                self._content = self._make()
                self._until = time.monotonic() + self._seconds
            return self._content


class HttpService:
    """Serves one application at `address`, ``host:port``, until the process ends.

    `what` it serves, and the `setting` that has its address, are for the notices.
    """

    def __init__(self, what: str, setting: str, address: str, notices: Notices) -> None:
        self.bound: str | None = None
        """``host:port`` where it is served; None while it is not."""
        host, _, port = address.rpartition(":")
        self._what, self._setting, self._notices = what, setting, notices
        self.host, self._port = host.strip("[]"), int(port)

    def serve(self, make: Callable[[], Application]) -> None:
        """Serve what ``make()`` returns; it is called in the service's thread, and may import. Never blocks, never raises."""
        threading.Thread(target=self._serve_in_thread, args=(make,), name=self._what, daemon=True).start()

    def _serve_in_thread(self, make: Callable[[], Application]) -> None:
        try:  # here: these take a while to import, and the agent has begun to serve
            from kcoord.agent.http_server import BoundedServer

            application = make()
        except ImportError as error:
            self._notices.tell(f"no {self._what}: {error}")
            return
        pause = _FIRST_RETRY
        while True:
            try:
                server = BoundedServer(self.host, self._port, application)
                break
            except (OSError, UnicodeError) as error:  # UnicodeError: the host is no name
                self._notices.tell(
                    f"no {self._what}: cannot listen at {self._setting}={self.host}:{self._port}: {error}: another agent of "
                    "this node may have it; everything else goes on",
                    about=self._what,
                )
                time.sleep(pause)
                pause = min(2 * pause, _SLOWEST_RETRY)
        host, port = server.server_address[:2]
        self.bound = f"[{host!s}]:{port}" if ":" in str(host) else f"{host!s}:{port}"
        log.info("%s at http://%s", self._what, self.bound)
        server.serve_forever()
