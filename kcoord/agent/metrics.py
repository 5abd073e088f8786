"""The agent's metrics for Prometheus. Imported only with KCOORD_METRICS, for `prometheus_client` takes 0.1 s.

Names follow Prometheus' conventions: base units (seconds, bytes), ``_total`` on counters. Every agent begins at 0: ``rate`` and
``increase`` add up over restarts. Figures come from the spans that ranks deliver (`kcoord.telemetry.figures`), and a claim's wait
lasts from the request's last byte to the answer. The agent's pulse copies gauges: a scrape runs nothing on the event loop.
"""

from __future__ import annotations

import platform
import time
from collections import Counter as Counted
from collections.abc import Iterable
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

import kcoord
from kcoord.agent.flights import State
from kcoord.agent.http_server import Application
from kcoord.agent.services import Services
from kcoord.leases.base import LeaseService
from kcoord.protocol.messages import Answer, Claim, Done, Lead, Publish, Ready, Request
from kcoord.telemetry.events import Notices
from kcoord.telemetry.figures import outcome_of
from kcoord.telemetry.spans import Span, plain_text

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds in seconds: from an answer without a wait to a process group's timeout."""
ANSWERS = ("wait", "store", "lead", "hedge", "failed", "busy", "alone")
OTHER = "other"
_MOST_BACKENDS = 16
_LONGEST_LABEL = 40
_ELSEWHERE = "elsewhere"  # the state of a flight that another node leads

_BREAKER = ("lease_service",)
METRICS: dict[str, tuple[tuple[str, ...], str]] = {
    "kcoord_requests_total": (("outcome", "backend"), "Requests of this node's ranks, by how they ended: memory_hits, local_hits,"
        " store_hits, waits (another rank compiled it meanwhile), compiles, failures; and those two of its pool."),
    "kcoord_uncoordinated_total": ((), "Compiles that nobody coordinated."),
    "kcoord_stood_aside_total": (("compiler", "part"), "Processes in which kcoord did not hook this part of a compiler, "
        "or compiles passed by the hook: its release lacks a function, or has another one."),
    "kcoord_saved_seconds_total": ((), "Compile seconds of each artifact that was loaded, not compiled."),
    "kcoord_claim_wait_seconds": (("backend", "answer"), "From a rank's claim to the answer: wait (another rank compiled "
        "it), store (it was there), pack (it was in the profile's pack), lead (compile it), hedge (compile it beside a slow one),"
        " failed, busy (asked without waiting), alone (compile it without coordination)."),
    "kcoord_compile_seconds": (("backend",), "Compiles of this node's ranks and pool; one within another counts its time once."),
    "kcoord_refused_publishes_total": ((), "Compiles that could not be kept: the log says why."),
    "kcoord_hedges_total": ((), "Ranks that went ahead beside a slow one."),
    "kcoord_stalls_total": ((), "Compiles whose processes did not use the CPU for KCOORD_STALL_SECONDS seconds."),
    "kcoord_flights": (("state",), "Keys that are under way, by state; elsewhere: another node compiles it."),
    "kcoord_waiting_claims": ((), "Claims of this node's ranks that have no answer yet."),
    "kcoord_leases_held": ((), "Leases that this agent holds and renews."),
    "kcoord_clients": ((), "Connections from ranks."),
    "kcoord_coordinated_by": (_BREAKER, "1 for the service that elects the compiler now."),
    "kcoord_breaker_open": (_BREAKER, "1 while a lease service cannot be used and the next one serves."),
    "kcoord_breaker_changes_total": ((*_BREAKER, "to"), "How often a breaker changed to this state."),
    "kcoord_store_usable": ((), "1 if the store takes what this node compiles. Absent without a store."),
    "kcoord_store_published_artifacts_total": ((), "Kernels that this agent put into the store."),
    "kcoord_store_published_bytes_total": ((), "Bytes of published kernels, before compression."),
    "kcoord_store_fetched_artifacts_total": ((), "Kernels that this agent read from the store, one by one."),
    "kcoord_store_fetched_bytes_total": ((), "Bytes of fetched kernels, before compression."),
    "kcoord_store_errors_total": (("operation", "error"), "Of publish or fetch: fault (the file system failed), invalid (what was"
        " read does not verify)."),
    "kcoord_store_bytes": ((), "Space of the artifacts in the store, at the last pass over it."),
    "kcoord_store_artifacts": ((), "Artifacts in the store, at the last pass over it."),
    "kcoord_store_files": ((), "Files and directories of the artifacts in the store, at that pass."),
    "kcoord_store_counted_timestamp_seconds": ((), "End of the last pass over the store."),
    "kcoord_store_max_bytes": ((), "KCOORD_STORE_MAX_SIZE, if it is set."),
    "kcoord_store_max_files": ((), "KCOORD_STORE_MAX_FILES, if it is set."),
    "kcoord_local_bytes": ((), "Space of this node's own copies, at its last pass, where they have a bound."),
    "kcoord_local_artifacts": ((), "This node's own copies, at its last pass."),
    "kcoord_local_files": ((), "Files and directories of this node's own copies, at its last pass."),
    "kcoord_local_counted_timestamp_seconds": ((), "End of the last pass over this node's own copies."),
    "kcoord_local_max_bytes": ((), "KCOORD_LOCAL_MAX_SIZE, or its default."),
    "kcoord_notices_total": ((), "Distinct warnings logged by this agent."),
    "kcoord_last_pulse_timestamp_seconds": ((), "When this agent last looked after its clients: about every second."),
    "kcoord_agent_info": (("agent", "kcoord_namespace"), "1; its labels name the agent."),
    "kcoord_build_info": (("version", "python"), "1; its labels name the versions of kcoord and Python."),
}  # fmt: skip
"""By name, labels and help. All metrics, but the ``process_*`` ones that `prometheus_client` reads from /proc."""

HISTOGRAMS = ("kcoord_claim_wait_seconds", "kcoord_compile_seconds")
_COUNTED = (
    "kcoord_requests_total", "kcoord_uncoordinated_total", "kcoord_stood_aside_total", "kcoord_saved_seconds_total",
    "kcoord_refused_publishes_total",
)  # fmt: skip
"""Counters of this module. Other parts of the agent keep the other ones, and the gauges."""

Vitals = list[tuple[str, tuple[str, ...], float]]


class Metrics:
    """The metrics of one agent, in a registry of their own. Thread-safe but for `look`."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # of the whole process, which has no others
        self.registry = CollectorRegistry(auto_describe=False)
        self._backends: dict[str, str] = {}  # name that a client sent → label
        self._vitals: Vitals = []  # replaced, and never changed
        self._counters = {name: Counter(name, *_about(name), registry=self.registry) for name in _COUNTED}
        waits, compiles = (Histogram(n, *_about(n), registry=self.registry, buckets=BUCKETS) for n in HISTOGRAMS)
        self._waits, self._compiles = waits, compiles
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def application(self) -> Application:
        """The WSGI application that serves these metrics, at every path."""
        return make_wsgi_app(self.registry)

    # Events.

    def answered(self, message: Request, answer: Answer, seconds: float) -> None:
        """`message` is answered, so many seconds after it arrived."""
        if isinstance(message, Claim):
            name = answer.op
            if isinstance(answer, Ready):
                name = answer.source
            elif isinstance(answer, Lead) and answer.hedges:
                name = "hedge"
            self._waits.labels(self.backend(message.backend), name).observe(seconds)
        elif isinstance(message, Publish) and not isinstance(answer, Done):
            self._counters["kcoord_refused_publishes_total"].inc()

    def delivered(self, spans: list[Span]) -> None:
        """A rank, or a worker of the pool, delivered `spans`."""
        for span in spans:
            if span.kind == "unhooked":
                self._counters["kcoord_stood_aside_total"].labels(
                    self.backend(span.backend), self.backend(span.name)
                ).inc()
            if outcome := outcome_of(span):
                backend = self.backend(span.backend)
                self._counters["kcoord_requests_total"].labels(outcome, backend).inc(span.count)
                self._counters["kcoord_saved_seconds_total"].inc(span.saved)
                if outcome == "compiles":
                    self._compiles.labels(backend).observe(max(0.0, span.seconds - span.inside))
                    self._counters["kcoord_uncoordinated_total"].inc(span.outcome == "alone")

    def backend(self, name: str) -> str:
        """The label of a backend or part that a client names. It may send any: only the first few get a label of their own."""
        if name not in self._backends and len(self._backends) < _MOST_BACKENDS:
            self._backends[name] = plain_text(name, _LONGEST_LABEL)
        return self._backends.get(name, OTHER)

    # The state of this moment.

    def look(self, agent: str, namespace: str, services: Services, leases: LeaseService, notices: Notices) -> None:
        """Copy the state of `agent`. Call it on the event loop; it costs microseconds."""
        self._vitals = [
            ("kcoord_agent_info", (agent, namespace), 1.0),
            ("kcoord_build_info", (kcoord.__version__, platform.python_version()), 1.0),
            ("kcoord_notices_total", (), notices.since(0)[1]),
            *_vitals(services, leases),
        ]

    def collect(self) -> Iterable[Metric]:
        found: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name, (labels, doc) in METRICS.items():
            if name in _COUNTED or name in HISTOGRAMS:
                continue
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            found[name] = family(name, doc, labels=labels)
        for name, labels, value in self._vitals:
            found[name].add_metric(labels, value)
        return found.values()


def _vitals(services: Services, leases: LeaseService) -> Iterable[tuple[str, tuple[str, ...], float]]:
    yield "kcoord_last_pulse_timestamp_seconds", (), time.time()
    yield "kcoord_clients", (), len(services.connections)
    yield "kcoord_leases_held", (), services.claims.acquisition.held
    yield "kcoord_coordinated_by", (_label(leases.name),), 1.0
    yield "kcoord_hedges_total", (), services.claims.hedged
    yield "kcoord_stalls_total", (), services.claims.stalled
    tiers = services.tiers
    if tiers.store.exists:
        yield "kcoord_store_usable", (), not tiers.store.faulty
    for how, unit in product(("published", "fetched"), ("artifacts", "bytes")):
        yield f"kcoord_store_{how}_{unit}_total", (), tiers.carried[f"{how}_{unit}"]
    for operation, error in product(("publish", "fetch"), ("fault", "invalid")):
        yield "kcoord_store_errors_total", (operation, error), tiers.faults[operation, error]
    for name, value in services.gauges().items():
        yield name, (), value
    states = Counted(_ELSEWHERE if flight.remote else flight.state.value for flight in services.claims.flights)
    for state in (*(state.value for state in State), _ELSEWHERE):
        yield "kcoord_flights", (state,), states[state]
    yield "kcoord_waiting_claims", (), sum(len(flight.waiters) for flight in services.claims.flights)
    for breaker in leases.breakers():
        service = _label(str(breaker["service"]))
        yield "kcoord_breaker_open", (service,), breaker["state"] == "open"
        yield "kcoord_breaker_changes_total", (service, "open"), float(breaker["opened"])
        yield "kcoord_breaker_changes_total", (service, "closed"), float(breaker["closed"])


def _about(name: str) -> tuple[str, tuple[str, ...]]:
    """Help and labels, as the constructors of `prometheus_client` take them."""
    labels, doc = METRICS[name]
    return doc, labels


def _label(name: str) -> str:
    """The label of a lease service: ``redis``, ``lease_files``."""
    return name.lower().replace(" ", "_")
