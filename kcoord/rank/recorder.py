"""Counters, spans and recipes of one process, delivered to the agent in batches.

There is a delivery after each compile, since a compile worker may be killed without a warning; after each of the first requests,
since a child may end by ``os._exit``, which Python does not tell us of; within a second after a later load; and at the end of the
process. A later handle from memory delivers nothing by itself, and no delivery starts an agent.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.errors import StoreError
from kcoord.files.daemon import Deferred
from kcoord.keys.cache_key import CacheKey
from kcoord.profiles.recipe import Recipe
from kcoord.protocol.identity import Identity
from kcoord.rank.client import AgentClient
from kcoord.rank.compilation import Compilation
from kcoord.rank.outbox import Outbox
from kcoord.settings import Settings
from kcoord.telemetry.counters import OUTCOMES, Counters, by_backend
from kcoord.telemetry.events import Notices
from kcoord.telemetry.ledger import Ledger
from kcoord.telemetry.span_files import write_own
from kcoord.telemetry.spans import SHORTEST_WAIT, Process, Spans

_EVERY = 1.0  # seconds between two deliveries of a rank that only loads
_FIRST = 16  # requests of a process that are delivered at once


@dataclass(frozen=True)
class _Delivery:
    number: int
    counters: dict[str, float]
    spans: list[list[Any]]
    dropped: int


class Recorder:
    """Records the outcome of each request, and delivers it. Thread-safe and fork-safe.

    `counters` are the job's; a request that counts elsewhere is no kernel of the job. Nothing is delivered while ``usable()`` is
    False: kcoord is off then. Not guaranteed: that the last delivery of a process counts once if its agent received it, hung
    before it answered, and went on after the process had ended.
    """

    def __init__(self, settings: Settings, client: AgentClient, notices: Notices, usable: Callable[[], bool]) -> None:
        self._settings, self._client, self._notices, self._usable = settings, client, notices, usable
        self.forget_after_fork()

    def forget_after_fork(self) -> None:
        """Start from zero: the parent delivers its own counters."""
        self.counters, self.spans = Counters(), Spans()
        self.outbox = Outbox(self._settings, self._client, self._notices)
        self._delivering = threading.Lock()  # protects a sum, or a span, from being delivered twice
        self._early, self._deliver_at = _FIRST, 0.0
        self._answered = True  # the last delivery; while none is, a hung agent must hold up no request
        self._later = Deferred(_EVERY, self.deliver)
        self._process, self._number = uuid.uuid4().hex, 0
        self._unanswered: _Delivery | None = None  # sent, and perhaps received

    def loaded(self, artifact: Artifact, outcome: str, counters: Counters, begun: float) -> None:
        """A request that began to load at `begun` ended with `artifact`; `outcome` names its counter."""
        saved = artifact.manifest.compile_seconds
        counters.add(requests=1, **{outcome: 1, by_backend(outcome, artifact.key.backend): 1}, saved_seconds=saved)
        aside, took = counters is not self.counters, time.perf_counter() - begun
        many = self.spans.add("load", "ok", artifact.key, begun, took, saved, aside)
        is_due = many or self._early > 0 or time.monotonic() >= self._deliver_at
        self._early -= 1
        if not (is_due and self._answered and self.deliver()):
            self._later.begin()

    def found_in_memory(self, backend: str) -> None:
        """A request ended with a handle in memory."""
        self.counters.add(requests=1, memory_hits=1, **{by_backend("memory_hits", backend): 1})
        if self._early > 0:
            self._early -= 1
            if not (self._answered and self.deliver()):
                self._later.begin()

    def waited(
        self, outcome: str, key: CacheKey, counters: Counters, begun: float, took: float, note: str = ""
    ) -> None:
        """The agent answered after `took` seconds: ``ok`` and ``fetch`` with an artifact, else with what the rank is to do."""
        counters.add(wait_seconds=took)
        kind, ended = ("fetch", "ok") if outcome == "fetch" else ("wait", outcome)
        if ended == "ok" or took >= SHORTEST_WAIT or ended == "failed":
            self.spans.add(kind, ended, key, begun, took, aside=counters is not self.counters, note=note)

    def ended(self, compilation: Compilation, amounts: dict[str, float]) -> None:
        """Count a request with its outcome, and deliver it at once."""
        backends = {by_backend(name, compilation.key.backend): amounts[name] for name in OUTCOMES if name in amounts}
        compilation.counters.add(requests=1, **amounts, **backends)
        if self._usable():
            took = amounts.get("compile_seconds", time.perf_counter() - compilation.started)
            coordinated = compilation.lead is not None or compilation.failed is not None
            outcome = "alone" if compilation.outcome == "ok" and not coordinated else compilation.outcome
            aside = compilation.counters is not self.counters
            self.spans.add(
                "compile", outcome, compilation.key, compilation.started, took, aside=aside, note=compilation.note
            )
        self.deliver()
        self.outbox.deliver()

    def record(self, recipe: Recipe) -> None:
        """Keep `recipe` for the profile that this job records, if it records one. Costs microseconds."""
        if self._settings.recorded_as is not None and self._usable():
            self.outbox.put(recipe)

    def deliver(self) -> bool:
        """Deliver counters and spans, together. False if no agent took them."""
        if not (self.counters.undelivered() or self.spans) or not self._usable():
            return True
        if not self._delivering.acquire(blocking=False):
            return True  # another thread delivers; the next delivery has the rest
        self._deliver_at = time.monotonic() + _EVERY
        try:
            for delivery in self._deliveries():
                sender = self._process, delivery.number
                self._answered = self._client.deliver(delivery.counters, delivery.spans, delivery.dropped, sender)
                if not self._answered:
                    return False
                self._unanswered = None
                self.counters.delivered(delivery.counters)
                self.spans.delivered(len(delivery.spans), delivery.dropped)
        finally:
            self._delivering.release()
        return True

    def _deliveries(self) -> Iterator[_Delivery]:
        """An unanswered delivery comes first, unchanged: by its number the agent knows whether it was counted."""
        if self._unanswered is not None:
            yield self._unanswered
        for spans, dropped in self.spans.batches():
            counters = self.counters.undelivered()
            if not (counters or spans or dropped):
                return
            self._number += 1
            self._unanswered = _Delivery(self._number, counters, spans, dropped)
            yield self._unanswered

    def close(self) -> None:
        """Deliver everything, or keep it on this node."""
        self._later.end(self._settings.agent_timeout)
        if not self.deliver():
            self._keep()
        if not self.outbox.deliver():
            self.outbox.keep()

    def _keep(self) -> None:
        """Write counters and spans to the agent's directories: a warm process needed no agent, and starts none for these."""
        counters = self.counters.undelivered()
        name = f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        ledger, who = Ledger(self._settings.local_dir, name), Identity.here(self._settings.job)
        ledger.add(who.job, counters)
        try:
            ledger.save()
            if self.spans:
                spans, dropped = self.spans.undelivered()
                write_own(self._settings.local_dir, who.job, name, Process.here(who.rank), spans, dropped)
                self.spans.delivered(len(spans), dropped)
        except (OSError, StoreError) as error:
            self._notices.tell(f"statistics are not kept: {error}")
        else:
            self.counters.delivered(counters)
            self._unanswered = None
