"""What an agent counts for its metrics, seen from outside: its clients' requests and its answers, and its use of the store.

Whoever answers does not know that it is counted. A claim's wait is measured from the request's last byte to the answer.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import kcoord
from kcoord.agent.chores.retention import Keeper
from kcoord.agent.claims import Claims
from kcoord.agent.connections import Connection, Connections
from kcoord.agent.flight import State
from kcoord.agent.flights import Flights
from kcoord.agent.lease_tasks import LeaseTasks
from kcoord.agent.metrics.prometheus import OTHER, Labels, Tally
from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.leases.base import LeaseService
from kcoord.telemetry.counters import OUTCOMES
from kcoord.telemetry.events import Notices
from kcoord.telemetry.ledger import sums_of

_ELSEWHERE = "elsewhere"  # the state of a flight that another node leads


@dataclass(frozen=True)
class _Asked:
    op: str
    backend: str
    since: float
    seconds: float = 0.0  # that a compile took


class MeteredConnections(Connections):
    """`Connections` that tell `tally` what goes to and fro."""

    def __init__(
        self,
        tally: Tally,
        agent: str,
        notices: Notices,
        tells_clients: bool,
        asked: Callable[[Connection, dict[str, Any]], None],
        gone: Callable[[Connection], None],
    ) -> None:
        super().__init__(agent, notices, tells_clients, self._note, self._forget)
        self._tally, self._handle, self._left_us = tally, asked, gone
        self._unanswered: dict[int, dict[int, _Asked]] = {}  # connection → request → what it was

    def send(self, connection: Connection, message: dict[str, Any]) -> None:
        self._answered(connection, message)
        super().send(connection, message)

    def _note(self, connection: Connection, message: dict[str, Any]) -> None:
        """A request, which nobody has checked yet: what is none is for others to refuse."""
        op, request, key = message.get("op"), message.get("id"), message.get("key")
        if isinstance(request, int) and connection in self:
            if op == "claim":
                asked = _Asked("claim", self._tally.backend(message.get("backend")), time.monotonic())
                self._unanswered.setdefault(connection.id, {})[request] = asked
            elif op == "publish" and isinstance(key, dict):
                took, backend = message.get("compile_seconds"), self._tally.backend(key.get("backend"))
                if isinstance(took, (int, float)) and 0 <= took < 1e9:
                    asked = _Asked("publish", backend, time.monotonic(), took)
                    self._unanswered.setdefault(connection.id, {})[request] = asked
        self._handle(connection, message)
        if op == "report":
            self._reported(message["counters"])

    def _reported(self, counters: dict[Any, Any]) -> None:
        sums = sums_of(counters)
        for name, amount in counters.items():
            outcome, at, backend = name.partition("@") if isinstance(name, str) else ("", "", "")
            if at and outcome in sums:
                amount = min(sums_of({outcome: amount}).get(outcome, 0.0), sums[outcome])
                sums[outcome] -= amount
                self._tally.add("kcoord_requests_total", amount, outcome, self._tally.backend(backend))
        for outcome in OUTCOMES:
            if sums.get(outcome):  # of a rank whose kcoord does not say
                self._tally.add("kcoord_requests_total", sums[outcome], outcome, OTHER)
        self._tally.add("kcoord_uncoordinated_total", sums.get("alone", 0.0))
        self._tally.add("kcoord_saved_seconds_total", sums.get("saved_seconds", 0.0))

    def _answered(self, connection: Connection, message: dict[str, Any]) -> None:
        op, requests = message.get("op"), self._unanswered.get(connection.id)
        if op == "waiting" or requests is None:
            return
        asked = requests.pop(message.get("id", -1), None)
        if asked is None:
            return
        if asked.op == "claim":
            answer = str(op)
            if op == "ready":
                answer = "wait" if message.get("source") == "wait" else "store"
            elif op == "lead":
                answer = "hedge" if message.get("hedges") else "lead"
            self._tally.observe("kcoord_claim_wait_seconds", time.monotonic() - asked.since, asked.backend, answer)
        elif op == "published":
            self._tally.observe("kcoord_compile_seconds", asked.seconds, asked.backend)
        else:
            self._tally.add("kcoord_refused_publishes_total")

    def _forget(self, connection: Connection) -> None:
        self._unanswered.pop(connection.id, None)
        self._left_us(connection)


class MeteredStore(Store):
    """A `Store` that tells `tally` what it carries, and what it cannot."""

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
    """The kind of store that counts for `tally`: made as any other."""
    return type("MeteredStore", (MeteredStore,), {"tally": tally})


def vitals(
    agent: str,
    namespace: str,
    connections: Connections,
    flights: Flights,
    claims: Claims,
    errands: LeaseTasks,
    leases: LeaseService,
    notices: Notices,
    keeper: Keeper,
    *,
    has_store: bool,
) -> dict[tuple[str, Labels], float]:
    """The agent's gauges now, for `kcoord.agent.metrics.prometheus.Page`. For the event loop; costs microseconds."""
    found: dict[tuple[str, Labels], float] = {
        ("kcoord_agent_info", (agent, namespace)): 1.0,
        ("kcoord_build_info", (kcoord.__version__, platform.python_version())): 1.0,
        ("kcoord_last_pulse_timestamp_seconds", ()): time.time(),
        ("kcoord_clients", ()): float(len(connections)),
        ("kcoord_leases_held", ()): float(errands.held),
        ("kcoord_coordinated_by", (_label(leases.name),)): 1.0,
        ("kcoord_notices_total", ()): float(notices.since(0)[1]),
        ("kcoord_hedges_total", ()): float(claims.hedged),
        ("kcoord_stalls_total", ()): float(claims.stalled_ones),
    }
    if has_store:
        found["kcoord_store_usable", ()] = float(not errands.store_is_faulty)
    found |= {(name, ()): value for name, value in keeper.vitals().items()}
    states = Counter(_ELSEWHERE if flight.remote else flight.state.value for flight in flights)
    for state in (*(state.value for state in State), _ELSEWHERE):
        found["kcoord_flights", (state,)] = float(states[state])
    found["kcoord_waiting_claims", ()] = float(sum(len(flight.waiters) for flight in flights))
    for breaker in leases.breakers():
        service = _label(str(breaker["service"]))
        found["kcoord_breaker_open", (service,)] = float(breaker["state"] == "open")
        found["kcoord_breaker_changes_total", (service, "open")] = float(breaker["opened"])
        found["kcoord_breaker_changes_total", (service, "closed")] = float(breaker["closed"])
    return found


def _label(name: str) -> str:
    """Of a lease service, as a label has it: ``redis``, ``lease_files``."""
    return name.lower().replace(" ", "_")
