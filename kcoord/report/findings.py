"""Findings of a job's time line: kernels by compile time, duplicate and failed compiles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from kcoord.report.timeline import Timeline
from kcoord.telemetry.spans import Process, Span
from kcoord.units import first_few

Placed = tuple[Process, Span]


@dataclass
class Kernel:
    """One key: its compiles, and the waits and loads of the other processes. Times are in seconds.

    `variant`: for people, the factors in which it differs from the job's other keys of its name.
    """

    backend: str
    name: str
    key: str
    aside: bool = False
    compiles: list[Placed] = field(default_factory=list)
    failures: list[Placed] = field(default_factory=list)
    lost: list[Placed] = field(default_factory=list)
    waiters: set[Process] = field(default_factory=set)
    longest_wait: float = 0.0
    loads: int = 0
    saved: float = 0.0
    variant: str = ""

    @property
    def seconds(self) -> float:
        """The time of all its compiles."""
        return sum(span.seconds for _, span in self.compiles)

    @property
    def more_than_once(self) -> float:
        """The seconds of all its compiles but the longest one."""
        return self.seconds - max((span.seconds for _, span in self.compiles), default=0.0)


@dataclass
class Findings:
    """The kernels of a time line. `Timeline.figures` has the sums."""

    kernels: list[Kernel]

    @property
    def compiled(self) -> list[Kernel]:
        """Kernels of the job, those that took longest first."""
        return sorted((k for k in self.kernels if k.compiles and not k.aside), key=lambda k: -k.seconds)

    @property
    def duplicates(self) -> list[Kernel]:
        return [k for k in self.compiled if len(k.compiles) > 1]

    @property
    def failures(self) -> list[Kernel]:
        """Kernels with a compile that failed, or was lost with its process."""
        return [k for k in self.kernels if k.failures or k.lost]


def findings_of(timeline: Timeline) -> Findings:
    kernels: dict[str, Kernel] = {}
    for process, span in timeline.spans():
        identity = f"{span.key}:{span.backend}:{span.name}"
        kernel = kernels.get(identity)
        if kernel is None:
            kernel = kernels[identity] = Kernel(span.backend, span.name, span.key, span.aside)
        if span.kind == "compile":
            _add_compile(kernel, process, span)
        elif span.kind == "load":
            kernel.loads += 1
            kernel.saved += span.saved
        elif span.kind == "wait" and span.outcome != "lead":  # a leader waited for its agent's answer
            kernel.waiters.add(process)
            kernel.longest_wait = max(kernel.longest_wait, span.seconds)
    return Findings(list(kernels.values()))


def _add_compile(kernel: Kernel, process: Process, span: Span) -> None:
    if span.compiled:
        kernel.compiles.append((process, span))
    elif span.outcome == "failed":
        kernel.failures.append((process, span))
    elif span.outcome == "lost":
        kernel.lost.append((process, span))


def why_again(kernel: Kernel) -> list[str]:
    """The reasons, each once, for which `kernel` was compiled more than once, as far as its spans show them."""
    found: dict[str, None] = {}
    compiles = sorted((span for _, span in kernel.compiles), key=lambda span: span.begin)
    for span in compiles:
        if span.outcome == "alone":
            found[f"nobody coordinated it: {span.note}" if span.note else "nobody coordinated it"] = None
        elif span.outcome == "private":
            why = span.note or "overridden code, another GPU's code, or a disk that refused it"
            found[f"it was not shared: {why}"] = None
        elif span.note:
            found[span.note] = None
    if kernel.lost:
        found["a process ended while it compiled, and the next one began"] = None
    shared = [span for span in compiles if span.outcome == "ok" and not span.note]
    if len(shared) > 1 and not kernel.lost:
        overlap = any(b.begin < a.end for a, b in pairwise(shared))
        found[
            "its lease ended before the compile did (KCOORD_LEASE_LIMIT), or its nodes did not see one another's lease or store"
            if overlap
            else "the published artifact was gone, or could not be fetched"
        ] = None
    return list(found)


def where(process: Process) -> str:
    """``node-3, rank 17``."""
    return f"{process.node}, {process.label()}"


def places(placed: Iterable[Placed]) -> str:
    """The first three processes in time, and the number of others."""
    found = list(dict.fromkeys(where(process) for process, _ in sorted(placed, key=lambda p: p[1].begin)))
    return first_few(found, 3, "; ")
