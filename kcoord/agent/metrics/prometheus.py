"""The table of all metrics, the sums of one agent, and the text of a page for Prometheus.

Names follow Prometheus' conventions: base units (seconds, bytes), ``_total`` on counters. Every agent begins at 0: ``rate`` and
``increase`` add up over restarts. The agent's event loop uses `Tally` alone, which is plain Python; `prometheus_client` is
imported with the first page.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kcoord.telemetry.spans import plain_text

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds in seconds: from an answer without a wait to a process group's timeout."""
ANSWERS = ("wait", "store", "lead", "hedge", "failed", "busy", "alone")
_MOST_BACKENDS = 16
_LONGEST_LABEL = 40
OTHER = "other"


@dataclass(frozen=True)
class Metric:
    """`kind` is ``counter``, ``gauge`` or ``histogram``; `labels` are names; `starts` are label values that begin at 0."""

    name: str
    kind: str
    doc: str
    labels: tuple[str, ...] = ()
    starts: tuple[tuple[str, ...], ...] = ()


def _counter(name: str, doc: str, *labels: str, starts: tuple[tuple[str, ...], ...] | None = None) -> Metric:
    return Metric(name, "counter", doc, labels, (() if labels else ((),)) if starts is None else starts)


METRICS = (
    _counter("kcoord_requests_total", "Requests of this node's ranks, by how they ended: memory_hits, local_hits, "
             "store_hits, waits (another rank compiled it meanwhile), compiles, failures.",
             "outcome", "backend"),
    _counter("kcoord_uncoordinated_total", "Compiles and failures that nobody coordinated."),
    _counter("kcoord_saved_seconds_total", "Compile seconds of each artifact that was loaded, not compiled."),
    Metric("kcoord_claim_wait_seconds", "histogram", "From a rank's claim to the agent's answer: wait (another rank "
           "compiled it), store (it was there), pack (it was in the profile's pack), lead (compile it), hedge (compile it beside "
           "a slow rank), failed, busy (asked without waiting), alone (compile it without coordination).",
           ("backend", "answer")),
    Metric("kcoord_compile_seconds", "histogram", "Compiles that this node's ranks handed in.", ("backend",)),
    _counter("kcoord_refused_publishes_total", "Compiles that could not be kept: the log says why."),
    _counter("kcoord_hedges_total", "Ranks that went ahead beside a slow one."),
    _counter("kcoord_stalls_total", "Compiles whose processes did not use the CPU for KCOORD_STALL_SECONDS seconds."),
    Metric("kcoord_flights", "gauge", "Keys that are under way, by state; elsewhere: another node compiles it.", ("state",)),
    Metric("kcoord_waiting_claims", "gauge", "Claims of this node's ranks that have no answer yet."),
    Metric("kcoord_leases_held", "gauge", "Leases that this agent holds and renews."),
    Metric("kcoord_clients", "gauge", "Processes that are connected to this agent."),
    Metric("kcoord_coordinated_by", "gauge", "1 for the service that elects the compiler now.", ("lease_service",)),
    Metric("kcoord_breaker_open", "gauge", "1 while a lease service cannot be used and the next one serves.", ("lease_service",)),
    _counter("kcoord_breaker_changes_total", "How often a breaker changed to this state.", "lease_service", "to"),
    Metric("kcoord_store_usable", "gauge", "1 if the store takes what this node compiles. Absent without a store."),
    _counter("kcoord_store_published_artifacts_total", "Artifacts that this agent put into the store."),
    _counter("kcoord_store_published_bytes_total", "Bytes of published artifacts, before compression."),
    _counter("kcoord_store_fetched_artifacts_total", "Artifacts that this agent read from the store."),
    _counter("kcoord_store_fetched_bytes_total", "Bytes of fetched artifacts, before compression."),
    _counter("kcoord_store_errors_total", "Of publish or fetch: fault (the file system failed), invalid (what was read "
             "does not verify).", "operation", "error",
             starts=(("publish", "fault"), ("publish", "invalid"), ("fetch", "fault"), ("fetch", "invalid"))),
    Metric("kcoord_store_bytes", "gauge", "Space of the artifacts in the store, at the last pass over it."),
    Metric("kcoord_store_artifacts", "gauge", "Artifacts in the store, at the last pass over it."),
    Metric("kcoord_store_files", "gauge", "Files and directories of the artifacts in the store, at that pass."),
    Metric("kcoord_store_counted_timestamp_seconds", "gauge", "End of the last pass over the store, by the file server's clock."),
    Metric("kcoord_store_max_bytes", "gauge", "KCOORD_STORE_MAX_SIZE, if it is set."),
    Metric("kcoord_store_max_files", "gauge", "KCOORD_STORE_MAX_FILES, if it is set."),
    Metric("kcoord_local_bytes", "gauge", "Space of this node's own copies, at its last pass, where they have a bound."),
    Metric("kcoord_local_artifacts", "gauge", "This node's own copies, at its last pass."),
    Metric("kcoord_local_files", "gauge", "Files and directories of this node's own copies, at its last pass."),
    Metric("kcoord_local_counted_timestamp_seconds", "gauge", "End of the last pass over this node's own copies."),
    Metric("kcoord_local_max_bytes", "gauge", "KCOORD_LOCAL_MAX_SIZE, or its default."),
    _counter("kcoord_notices_total", "Different warnings that this agent has logged."),
    Metric("kcoord_last_pulse_timestamp_seconds", "gauge", "When this agent last looked after its clients: about every second."),
    Metric("kcoord_agent_info", "gauge", "1; its labels name the agent.", ("agent", "kcoord_namespace")),
    Metric("kcoord_build_info", "gauge", "1; its labels name the versions of kcoord and Python.", ("version", "python")),
)  # fmt: skip
"""All metrics, but the ``process_*`` ones that `prometheus_client` reads from /proc."""

Labels = tuple[str, ...]
Samples = Mapping[tuple[str, Labels], float]


@dataclass
class Histogram:
    """`counts` has one number more than `BUCKETS`, for values above them all."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    sum: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        total, found = 0, []
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Tally:
    """Sums and histograms of one agent. Thread-safe; a call costs about a microsecond, and never waits for a page."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # protects all below; held for moments only
        self._sums: dict[tuple[str, Labels], float] = {
            (metric.name, start): 0.0 for metric in METRICS for start in metric.starts
        }
        self._histograms: dict[tuple[str, Labels], Histogram] = {}
        self._backends: dict[str, str] = {}  # name that a client sent → label

    def add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        """Add to the counter `name`."""
        with self._lock:
            self._sums[name, labels] = self._sums.get((name, labels), 0.0) + amount

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        """One more in the histogram `name`."""
        with self._lock:
            histogram = self._histograms.get((name, labels))
            if histogram is None:
                histogram = self._histograms[name, labels] = Histogram()
            histogram.observe(seconds)

    def backend(self, name: object) -> str:
        """The label of a backend that a client names. A client may send any name: only the first few get a label of their own."""
        if not isinstance(name, str):
            return OTHER
        with self._lock:
            label = self._backends.get(name)
            if label is None:
                label = plain_text(name, _LONGEST_LABEL) if len(self._backends) < _MOST_BACKENDS else OTHER
                if label != OTHER:
                    self._backends[name] = label
        return label

    def read(self) -> tuple[dict[tuple[str, Labels], float], dict[tuple[str, Labels], Histogram]]:
        """Everything at one moment."""
        with self._lock:
            copies = {key: Histogram(h.counts.copy(), h.sum) for key, h in self._histograms.items()}
            return dict(self._sums), copies


class Page:
    """The text that Prometheus scrapes: the sums of `tally`, and the gauges that ``vitals()`` returns."""

    def __init__(self, tally: Tally, vitals: Callable[[], Samples]) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector

        self._tally, self._vitals = tally, vitals
        self._registry: CollectorRegistry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def collect(self) -> Iterable[Family]:
        from prometheus_client import metrics_core as core

        sums, histograms = self._tally.read()
        sums.update(self._vitals())
        found: dict[str, Family] = {}
        for metric in METRICS:
            if metric.kind == "histogram":
                found[metric.name] = core.HistogramMetricFamily(metric.name, metric.doc, labels=metric.labels)
            elif metric.kind == "counter":
                found[metric.name] = core.CounterMetricFamily(metric.name, metric.doc, labels=metric.labels)
            else:
                found[metric.name] = core.GaugeMetricFamily(metric.name, metric.doc, labels=metric.labels)
        for (name, labels), value in sums.items():
            found[name].add_metric(labels, value)  # type: ignore[attr-defined]
        for (name, labels), histogram in histograms.items():
            found[name].add_metric(labels, histogram.cumulative(), histogram.sum)  # type: ignore[attr-defined]
        return found.values()

    def render(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self._registry)
