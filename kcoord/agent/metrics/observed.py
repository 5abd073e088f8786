"""The agent's metrics, seen from outside: requests and answers, the use of the store, and the gauges of this moment.

A claim's wait is measured from the request's last byte to the answer.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import kcoord
from kcoord.agent.claims import Claims
from kcoord.agent.connections import Connections, Observer
from kcoord.agent.flights import State
from kcoord.agent.metrics.prometheus import OTHER, Labels, Tally
from kcoord.agent.tiers import Tiers
from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.leases.base import LeaseService
from kcoord.protocol.messages import Answer, Claim, Done, Lead, Publish, Ready, Request
from kcoord.telemetry.counters import OUTCOMES
from kcoord.telemetry.events import Notices
from kcoord.telemetry.ledger import sums_of

_ELSEWHERE = "elsewhere"  # the state of a flight that another node leads


class RequestMetrics(Observer):
    """Counts answers and deliveries in `tally`."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def answered(self, message: Request, answer: Answer, seconds: float) -> None:
        if isinstance(message, Claim):
            name = answer.op
            if isinstance(answer, Ready):
                name = answer.source
            elif isinstance(answer, Lead) and answer.hedges:
                name = "hedge"
            self._tally.observe("kcoord_claim_wait_seconds", seconds, self._tally.backend(message.backend), name)
        elif isinstance(message, Publish) and isinstance(answer, Done):
            backend = self._tally.backend(message.key.backend)
            self._tally.observe("kcoord_compile_seconds", message.compile_seconds, backend)
        elif isinstance(message, Publish):
            self._tally.add("kcoord_refused_publishes_total")

    def counted(self, counters: dict[Any, Any]) -> None:
        sums = sums_of(counters)
        for name, amount in counters.items():
            outcome, at, backend = name.partition("@") if isinstance(name, str) else ("", "", "")
            if at and outcome in sums:
                amount = min(sums_of({outcome: amount}).get(outcome, 0.0), sums[outcome])
                sums[outcome] -= amount
                self._tally.add("kcoord_requests_total", amount, outcome, self._tally.backend(backend))
        for outcome in OUTCOMES:
            if sums.get(outcome):  # of a rank whose kcoord does not name the backend
                self._tally.add("kcoord_requests_total", sums[outcome], outcome, OTHER)
        self._tally.add("kcoord_uncoordinated_total", sums.get("alone", 0.0))
        self._tally.add("kcoord_saved_seconds_total", sums.get("saved_seconds", 0.0))


class MeteredStore(Store):
    """A `Store` that counts its publishes, its fetches and its errors in `tally`."""

    tally: ClassVar[Tally]

    def publish(self, manifest: Manifest, *rest: Any, **named: Any) -> str:
        try:
            stated = super().publish(manifest, *rest, **named)
        except (StoreError, ArtifactInvalid) as error:
            self._failed("publish", error)
            raise
        self._carried("published", manifest)
        return stated

    def fetch(self, *asked: Any, **named: Any) -> tuple[Manifest, dict[str, bytes], str] | None:
        try:
            found = super().fetch(*asked, **named)
        except (StoreError, ArtifactInvalid) as error:
            self._failed("fetch", error)
            raise
        if found is not None:
            self._carried("fetched", found[0])
        return found

    def _carried(self, what: str, manifest: Manifest) -> None:
        self.tally.add(f"kcoord_store_{what}_artifacts_total")
        self.tally.add(f"kcoord_store_{what}_bytes_total", float(sum(entry.size for entry in manifest.files)))

    def _failed(self, operation: str, error: StoreError | ArtifactInvalid) -> None:
        kind = "fault" if isinstance(error, StoreError) else "invalid"
        self.tally.add("kcoord_store_errors_total", 1.0, operation, kind)


def metered_store(tally: Tally) -> type[Store]:
    """A class of stores that count in `tally`."""
    return type("MeteredStore", (MeteredStore,), {"tally": tally})


def vitals(
    agent: str,
    namespace: str,
    connections: Connections,
    claims: Claims,
    tiers: Tiers,
    leases: LeaseService,
    notices: Notices,
    retention_gauges: Callable[[], dict[str, float]],
    *,
    has_store: bool,
) -> dict[tuple[str, Labels], float]:
    """The agent's gauges now, for `kcoord.agent.metrics.prometheus.Page`. Call it on the event loop; it costs microseconds."""
    found: dict[tuple[str, Labels], float] = {
        ("kcoord_agent_info", (agent, namespace)): 1.0,
        ("kcoord_build_info", (kcoord.__version__, platform.python_version())): 1.0,
        ("kcoord_last_pulse_timestamp_seconds", ()): time.time(),
        ("kcoord_clients", ()): float(len(connections)),
        ("kcoord_leases_held", ()): float(claims.acquisition.held),
        ("kcoord_coordinated_by", (_label(leases.name),)): 1.0,
        ("kcoord_notices_total", ()): float(notices.since(0)[1]),
        ("kcoord_hedges_total", ()): float(claims.hedged),
        ("kcoord_stalls_total", ()): float(claims.stalled_ones),
    }
    if has_store:
        found["kcoord_store_usable", ()] = float(not tiers.store.faulty)
    found |= {(name, ()): value for name, value in retention_gauges().items()}
    states = Counter(_ELSEWHERE if flight.remote else flight.state.value for flight in claims.flights)
    for state in (*(state.value for state in State), _ELSEWHERE):
        found["kcoord_flights", (state,)] = float(states[state])
    found["kcoord_waiting_claims", ()] = float(sum(len(flight.waiters) for flight in claims.flights))
    for breaker in leases.breakers():
        service = _label(str(breaker["service"]))
        found["kcoord_breaker_open", (service,)] = float(breaker["state"] == "open")
        found["kcoord_breaker_changes_total", (service, "open")] = float(breaker["opened"])
        found["kcoord_breaker_changes_total", (service, "closed")] = float(breaker["closed"])
    return found


def _label(name: str) -> str:
    """The label of a lease service: ``redis``, ``lease_files``."""
    return name.lower().replace(" ", "_")
