"""The counters of a job.

Each request for a key ends in exactly one of `OUTCOMES`, so their sum is `requests` when no request is under way.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

OUTCOMES = ("memory_hits", "local_hits", "store_hits", "waits", "compiles", "failures")
"""memory: a loaded handle; local: on this node already; store: fetched; waits: another rank compiled it meanwhile."""

COUNTERS = (
    "requests", *OUTCOMES, "pack_hits", "alone", "ahead", "ahead_used", "compile_seconds", "wait_seconds", "saved_seconds",
)  # fmt: skip
"""``pack_hits``: store hits that came from a pack. ``alone``: compiles and failures that nobody coordinated. ``ahead``: compiles
of the node's pool, and how many of these kernels ranks have loaded since. ``saved_seconds``: the recorded compile seconds of each
artifact that was loaded instead of compiled."""


def by_backend(outcome: str, backend: str) -> str:
    """The counter of one backend's outcome, which a process delivers beside the sum. Metrics use it, a job's sums do not."""
    return f"{outcome}@{backend}"


class Counters:
    """Thread-safe sums. Not guaranteed: that two counters are of one moment."""

    def __init__(self) -> None:
        # protects both; reentrant, since a signal handler may count while its thread holds it
        self._lock = threading.RLock()
        self._sums: dict[str, float] = {}
        self._delivered: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] = self._sums.get(name, 0) + amount

    def undelivered(self) -> dict[str, float]:
        """The amounts that were added and not yet marked as `delivered`."""
        with self._lock:
            rest = {n: v - self._delivered.get(n, 0) for n, v in list(self._sums.items())}
        return {n: v for n, v in rest.items() if v}

    def delivered(self, amounts: Mapping[str, float]) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._delivered[name] = self._delivered.get(name, 0) + amount

    def read(self) -> dict[str, float]:
        """All sums since this process began; 0 for a counter without amounts."""
        with self._lock:
            return complete(self._sums)


def complete(sums: Mapping[str, float]) -> dict[str, float]:
    """`sums` with every counter; whole numbers as int, seconds rounded to a millisecond."""
    found: dict[str, float] = {}
    for name in COUNTERS:
        value = sums.get(name, 0)
        found[name] = round(value, 3) if name.endswith("_seconds") else int(value)
    return found


def summary(sums: Mapping[str, float]) -> str:
    """One line for the user."""
    c = complete(sums)
    loaded = int(c["memory_hits"] + c["local_hits"] + c["store_hits"] + c["waits"])
    line = (
        f"{c['requests']} kernels asked for, {c['compiles']} compiled in {c['compile_seconds']:.1f} s, "
        f"{loaded} loaded, {c['saved_seconds']:.1f} s of compiling saved"
    )
    if c["ahead"]:
        line += f", {c['ahead']} compiled ahead ({c['ahead_used']} of them used)"
    if c["failures"]:
        line += f", {c['failures']} failed"
    if c["alone"]:
        line += f", {c['alone']} compiled without coordination"
    return line
