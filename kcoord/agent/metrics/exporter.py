"""The agent's metrics over HTTP: ``GET /metrics`` and nothing else, at KCOORD_METRICS.

Served by threads of its own: no claim waits for a scrape, and no client of this port can fail the agent. A page is made at most
once a second, however often it is asked for, from the vitals that the agent's pulse left behind: a scrape shares nothing with
claims but the tally's lock, for microseconds. A port that is in use is one notice, and is tried again now and then: an earlier
agent may still be ending. Not guaranteed: any secrecy. Whoever reaches the port reads the page, which names no kernel, job or
path.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from kcoord.agent.metrics.observed import RequestMetrics
from kcoord.agent.metrics.prometheus import Labels, Tally
from kcoord.telemetry.events import Notices

log = logging.getLogger("kcoord.metrics")

_FIRST_RETRY, _SLOWEST_RETRY = 1.0, 60.0  # seconds


class Exporter:
    """Serves one agent's metrics at `address`, ``host:port``, until the process ends. `begin` never blocks and never raises."""

    def __init__(self, address: str, notices: Notices) -> None:
        self.tally = Tally()
        self.observer = RequestMetrics(self.tally)
        self.vitals: Mapping[tuple[str, Labels], float] = {}
        """The gauges now. The agent's pulse replaces this mapping, and never changes one that it has set."""
        self.bound: str | None = None
        """``host:port`` where the page is served; None while it is not."""
        host, _, port = address.rpartition(":")
        self._host, self._port, self._notices = host.strip("[]"), int(port), notices

    def begin(self) -> None:
        threading.Thread(target=self._serve, name="metrics", daemon=True).start()

    def _serve(self) -> None:
        try:  # here: prometheus_client takes a while to import, and the agent has begun to serve
            from kcoord.agent.metrics.scrapes import ScrapeServer
        except ImportError as error:
            self._notices.tell(f"no metrics: {error}: pip install prometheus-client")
            return
        pause = _FIRST_RETRY
        while True:
            try:
                server = ScrapeServer(self._host, self._port, self.tally, lambda: self.vitals)
                break
            except (OSError, UnicodeError) as error:  # UnicodeError: the host is no name
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
