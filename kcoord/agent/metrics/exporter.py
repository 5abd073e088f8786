"""The agent's metrics over HTTP: ``GET /metrics`` and nothing else, at KCOORD_METRICS.

A page is made at most once a second, however often it is asked for, from the vitals that the agent's pulse left behind: a scrape
shares nothing with claims but the tally's lock, for microseconds. Not guaranteed: any secrecy. Whoever reaches the port reads the
page, which names no kernel, job or path.
"""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.agent.http_service import HttpService
from kcoord.agent.metrics.observed import RequestMetrics
from kcoord.agent.metrics.prometheus import Labels, Page, Tally
from kcoord.agent.metrics.scrapes import Scrapes
from kcoord.telemetry.events import Notices


class Exporter(HttpService):
    """Serves one agent's metrics at `address`, ``host:port``, until the process ends. `begin` never blocks and never raises."""

    def __init__(self, address: str, notices: Notices) -> None:
        super().__init__("metrics", "KCOORD_METRICS", address, notices)
        self.tally = Tally()
        self.observer = RequestMetrics(self.tally)
        self.vitals: Mapping[tuple[str, Labels], float] = {}
        """The gauges now. The agent's pulse replaces this mapping, and never changes one that it has set."""

    def begin(self) -> None:
        self.serve(lambda: Scrapes(Page(self.tally, lambda: self.vitals)))
