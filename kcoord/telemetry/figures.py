"""The figures of a job: sums over its spans, as the launcher's last line, ``kcoord stats``, the report and the metrics say them.

Each request of a rank ends in exactly one of `OUTCOMES`, so their sum is `requests`, and the compiles and failures of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kcoord.telemetry.spans import Process, Span
from kcoord.units import first_few

OUTCOMES = ("memory_hits", "local_hits", "store_hits", "waits", "compiles", "failures")
"""memory: a loaded handle; local: on this node already; store: fetched; waits: another rank compiled it meanwhile."""

FIGURES = (
    "requests", *OUTCOMES, "kernels", "pack_hits", "alone", "ahead", "ahead_used", "compile_seconds", "wait_seconds",
    "saved_seconds", "ready", "dropped", "stood_aside", "unfinished",
)  # fmt: skip
"""``kernels``: different keys. ``pack_hits``: store hits that came from a pack. ``alone``: compiles that nobody coordinated.
``ahead``: keys that the pool compiled; ``ahead_used``: those that ranks have loaded. ``compile_seconds``: the time of a compile
within another one of its thread counts once. ``saved_seconds``: the recorded compile seconds of each artifact that was loaded
instead of compiled. ``ready``: the moment at which the last kernel was compiled or loaded, in Unix seconds; 0 before the first.
``dropped``: lost spans, which the other figures lack.
``stood_aside``: the parts of compilers that kcoord did not hook, each with its ``compiler``, ``part``, ``why`` and ``ranks``.
``unfinished``: the kernels that nobody has compiled and whose last compile ended with its process, each with its ``kernel``,
``process`` and ``seconds``."""

Sums = dict[str, Any]
"""Numbers by figure, and the lists ``stood_aside`` and ``unfinished``."""

_MOST_LISTED, _MOST_TOLD = 32, 3  # of a job, and in a line
_MOST_KEYS = 100_000  # of a job; further ones are not told from one another
_LOADS = {"": "local_hits", "store": "store_hits", "pack": "store_hits", "wait": "waits"}


def outcome_of(span: Span) -> str | None:
    """The one of `OUTCOMES` in which `span` ended a request; None if it ended none, or none for a kernel of the job."""
    if span.aside:
        return None
    if span.kind == "load":
        return _LOADS.get(span.source, "store_hits")
    if span.kind == "compile":
        return "compiles" if span.compiled else "failures" if span.outcome in ("failed", "given up") else None
    return "memory_hits" if span.kind == "memory" else None


class Figures:
    """Sums over spans that are added one by one. Not thread-safe."""

    def __init__(self) -> None:
        self.dropped = 0
        self._sums = dict.fromkeys(FIGURES[:-2], 0.0)
        self._keys: set[str] = set()
        self._ahead: set[str] = set()
        self._loaded: set[str] = set()
        self._compiled: set[str] = set()
        self._lost: dict[str, dict[str, Any]] = {}  # compiles that their process did not end, by key
        self._asides: dict[tuple[str, str, str], set[object]] = {}  # processes, by compiler, part and reason

    def add(self, span: Span, process: Process | None = None) -> None:
        """Add a span of a `process`, by default of this one, no worker of a pool."""
        pool = process is not None and process.pool
        if span.aside:
            return
        if span.kind == "unhooked":
            what = span.backend, span.name, span.note
            if what in self._asides or len(self._asides) < _MOST_LISTED:
                who = process if process is None or process.rank is None else process.rank  # that may have had several
                self._asides.setdefault(what, set()).add(who)
        if outcome := outcome_of(span):
            self._sums[outcome] += span.count
            self._sums["requests"] += 0 if pool else span.count
        if span.key and len(self._keys) < _MOST_KEYS:
            self._keys.add(span.key)
        if span.kind in ("compile", "load") and outcome not in (None, "failures"):
            self._sums["ready"] = max(self._sums["ready"], span.end)
        if span.outcome == "lost" and (span.key in self._lost or len(self._lost) < _MOST_LISTED):
            label = "a process" if process is None else process.label()
            self._lost[span.key] = {"kernel": span.name, "process": label, "seconds": round(span.seconds, 3)}
        if span.compiled:
            if len(self._compiled) < _MOST_KEYS:
                self._compiled.add(span.key)
            self._sums["compile_seconds"] += max(0.0, span.seconds - span.inside)
            self._sums["alone"] += span.outcome == "alone"
            if pool and len(self._ahead) < _MOST_KEYS:
                self._ahead.add(span.key)
        elif span.kind == "wait":
            self._sums["wait_seconds"] += span.seconds
        elif span.kind == "load":
            self._sums["pack_hits"] += span.source == "pack"
            self._sums["saved_seconds"] += span.saved
            if len(self._loaded) < _MOST_KEYS:
                self._loaded.add(span.key)

    @property
    def ready(self) -> float:
        """The figure of this name."""
        return self._sums["ready"]

    def read(self) -> Sums:
        """All `FIGURES`; whole numbers as int, seconds rounded to a millisecond."""
        exact = ("ready", "compile_seconds", "wait_seconds", "saved_seconds")
        used = len(self._ahead & self._loaded)
        sizes = {"kernels": len(self._keys), "ahead": len(self._ahead), "ahead_used": used, "dropped": self.dropped}
        sums = {n: round(v, 3) if n in exact else int(v) for n, v in {**self._sums, **sizes}.items()}
        asides = [
            {"compiler": compiler, "part": part, "why": why, "ranks": len(who)}
            for (compiler, part, why), who in self._asides.items()
        ]
        unfinished = [lost for key, lost in self._lost.items() if key not in self._compiled]
        return {**sums, "stood_aside": asides, "unfinished": unfinished}


def figures(spans: Iterable[tuple[Process, Span]], dropped: int = 0) -> Sums:
    """The figures of a job with these spans, of which `dropped` others are missing."""
    found = Figures()
    found.dropped = dropped
    for process, span in spans:
        found.add(span, process)
    return found.read()


def asides(found: Mapping[str, Any]) -> list[str]:
    """Lines for the user: ``kcoord stood aside from tuning (torch 2.16.0: Autotuner._bench differs) in 8 ranks``."""
    return [
        f"kcoord stood aside from {each['part']} ({each['why']}) in {_several(each['ranks'], 'rank')}"
        for each in found["stood_aside"]
    ]


def troubles(found: Mapping[str, Any]) -> list[str]:
    """Lines for the user about a job that was not as it should be, the worst first."""
    lines = [
        f"{each['kernel']} was being compiled by {each['process']} for {each['seconds']:.1f} s when that process ended"
        for each in found["unfinished"]
    ]
    if found["failures"]:
        lines.append(f"{_several(found['failures'], 'compile')} failed")
    if found["alone"]:
        lines.append(f"{_several(found['alone'], 'kernel')} compiled without coordination")
    if told := asides(found):
        lines.append(f"{first_few(told, _MOST_TOLD, '; ')}: each compiled for itself; kcoord doctor")
    if found["dropped"]:
        lines.append(f"{_several(found['dropped'], 'span')} lost: the figures are too small")
    return lines


def summary(found: Mapping[str, Any], since: float = 0.0) -> str:
    """One line for the user: ``8 kernels: 8 compiled, 24 loaded (4.1 s saved); all ready 3.8 s after launch``.

    `since`: the moment of the launch, in Unix seconds; 0 leaves that part out.
    """
    loaded = found["memory_hits"] + found["local_hits"] + found["store_hits"] + found["waits"]
    line = (
        f"{_several(found['kernels'], 'kernel')}: {found['compiles']} compiled, {loaded} loaded "
        f"({found['saved_seconds']:.1f} s saved)"
    )
    if since and found["ready"]:
        line += f"; all ready {max(0.0, found['ready'] - since):.1f} s after launch"
    return line


def _several(count: float, one: str) -> str:
    return f"{count} {one}{'' if count == 1 else 's'}"
