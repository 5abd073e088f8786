"""What a job's time line says: sums, its slowest kernels, what was compiled again, what failed, whose clocks disagree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from kcoord.report.trace import Timeline
from kcoord.telemetry.spans import Process, Span

_LONGEST_PAUSE = 30.0  # seconds without a span: what follows is another episode
_CLOCKS_AGREE = 0.010  # seconds; a process notes its clock once, and steps of it are no news

Placed = tuple[Process, Span]


@dataclass
class Kernel:
    """One key: who compiled it, and what that spared and cost the others. Times are in seconds."""

    backend: str
    name: str
    key: str
    aside: bool = False
    compiles: list[Placed] = field(default_factory=list)
    failures: list[Placed] = field(default_factory=list)
    lost: list[Placed] = field(default_factory=list)
    waiters: set[Process] = field(default_factory=set)
    waited: float = 0.0
    longest_wait: float = 0.0
    loads: int = 0
    saved: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all its compiles."""
        return sum(span.seconds for _, span in self.compiles)

    @property
    def more_than_once(self) -> float:
        """What its compiles took more than the longest one alone."""
        return self.seconds - max((span.seconds for _, span in self.compiles), default=0.0)


@dataclass(frozen=True)
class Miss:
    """Kernels that were compiled for one reason. `differences` from an earlier artifact's key to theirs: factor, before, now."""

    reason: str
    differences: tuple[tuple[str, str, str], ...]
    kernels: tuple[Kernel, ...]

    @property
    def seconds(self) -> float:
        return sum(k.seconds for k in self.kernels)


@dataclass
class Findings:
    """Sums are those of the counters of ``kcoord stats``, of what the time line holds: memory hits leave no span.

    Of Triton's own C modules (`Kernel.aside`) and the like there are spans, and they are in no sum but `seconds_of`.
    """

    kernels: list[Kernel]
    seconds_of: dict[str, float]
    count_of: dict[str, int]
    episodes: list[tuple[float, float]]
    clocks: list[tuple[str, str, float]]
    """Node of the compile, node of the wait that ended before it, and by how many seconds at least."""

    @property
    def compiled(self) -> list[Kernel]:
        """Longest first."""
        return sorted((k for k in self.kernels if k.compiles and not k.aside), key=lambda k: -k.seconds)

    @property
    def compiles(self) -> int:
        return sum(len(k.compiles) for k in self.compiled)

    @property
    def compile_seconds(self) -> float:
        return sum(k.seconds for k in self.compiled)

    @property
    def loads(self) -> int:
        return sum(k.loads for k in self.kernels if not k.aside)

    @property
    def saved_seconds(self) -> float:
        return sum(k.saved for k in self.kernels if not k.aside)

    @property
    def wait_seconds(self) -> float:
        return self.seconds_of.get("wait", 0.0)

    @property
    def duplicates(self) -> list[Kernel]:
        return [k for k in self.compiled if len(k.compiles) > 1]

    @property
    def failures(self) -> list[Kernel]:
        """What failed, or was lost with its process."""
        return [k for k in self.kernels if k.failures or k.lost]


def findings_of(timeline: Timeline) -> Findings:
    kernels: dict[str, Kernel] = {}
    seconds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    waits: dict[str, list[Placed]] = defaultdict(list)
    led: dict[str, list[Placed]] = defaultdict(list)
    for process, span in timeline.spans():
        identity = f"{span.key}:{span.backend}:{span.name}"
        kernel = kernels.get(identity)
        if kernel is None:
            kernel = kernels[identity] = Kernel(span.backend, span.name, span.key, span.aside)
        if span.kind != "compile" or span.compiled:
            seconds[span.kind] += span.seconds
            counts[span.kind] += 1
        if span.kind == "compile":
            _add_compile(kernel, process, span)
        elif span.kind == "load":
            kernel.loads += 1
            kernel.saved += span.saved
        elif span.kind == "wait" and span.outcome == "lead":
            led[identity].append((process, span))
        elif span.kind == "wait":
            _add_wait(kernel, process, span)
            if span.outcome == "ok":
                waits[identity].append((process, span))
    for identity, asked in led.items():
        kernel = kernels[identity]
        for process, span in (
            asked if kernel.lost or kernel.failures else ()
        ):  # else its agent was slow to say that it leads
            _add_wait(kernel, process, span)
    disagreements = _clocks(kernels, waits)
    return Findings(list(kernels.values()), dict(seconds), dict(counts), _episodes(timeline), disagreements)


def _add_wait(kernel: Kernel, process: Process, span: Span) -> None:
    kernel.waiters.add(process)
    kernel.waited += span.seconds
    kernel.longest_wait = max(kernel.longest_wait, span.seconds)


def _add_compile(kernel: Kernel, process: Process, span: Span) -> None:
    if span.compiled:
        kernel.compiles.append((process, span))
    elif span.outcome == "failed":
        kernel.failures.append((process, span))
    elif span.outcome == "lost":
        kernel.lost.append((process, span))


def why_again(kernel: Kernel) -> list[str]:
    """Why `kernel` was compiled more than once, as far as the spans say, each reason once."""
    found: dict[str, None] = {}
    compiles = sorted((span for _, span in kernel.compiles), key=lambda span: span.begin)
    for span in compiles:
        if span.outcome == "alone":
            found[f"nobody coordinated it: {span.note}" if span.note else "nobody coordinated it"] = None
        elif span.outcome == "private":
            found["it was not shared: overridden code, another GPU's code, or a disk that refused it"] = None
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
            else "what had been published was gone, or could not be fetched"
        ] = None
    return list(found)


def _episodes(timeline: Timeline) -> list[tuple[float, float]]:
    """The times in which anything was under way, apart by more than `_LONGEST_PAUSE` seconds."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted((span.begin, span.end) for _, span in timeline.spans()):
        if found and begin - found[-1][1] <= _LONGEST_PAUSE:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _clocks(kernels: dict[str, Kernel], waits: dict[str, list[Placed]]) -> list[tuple[str, str, float]]:
    """Pairs of nodes of which one has waited, by its clock, for less long than the other compiled; worst first."""
    worst: dict[tuple[str, str], float] = {}
    for identity, waiting in waits.items():
        kernel = kernels[identity]
        if len(kernel.compiles) != 1 or kernel.lost or kernel.failures:
            continue  # it would not be clear for which one they waited
        process, compile = kernel.compiles[0]
        for waiter, wait in waiting:
            early = compile.end - wait.end
            if early > _CLOCKS_AGREE and waiter.node != process.node:
                pair = process.node, waiter.node
                worst[pair] = max(early, worst.get(pair, 0.0))
    return sorted(((a, b, by) for (a, b), by in worst.items()), key=lambda found: -found[2])


def where(process: Process) -> str:
    """``node-3, rank 17``, for people."""
    return f"{process.node}, {process.label()}"


def places(placed: Iterable[Placed]) -> str:
    """Where they were, for people: the first three in time."""
    found = list(dict.fromkeys(where(process) for process, _ in sorted(placed, key=lambda p: p[1].begin)))
    return "; ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def grouped(misses: Iterable[tuple[str, tuple[tuple[str, str, str], ...], Kernel]]) -> list[Miss]:
    """Kernels with one and the same reason together; those that took longest first."""
    groups: dict[tuple[str, tuple[tuple[str, str, str], ...]], list[Kernel]] = defaultdict(list)
    for reason, differences, kernel in misses:
        groups[reason, differences].append(kernel)
    found = [Miss(reason, differences, tuple(kernels)) for (reason, differences), kernels in groups.items()]
    return sorted(found, key=lambda m: -m.seconds)
