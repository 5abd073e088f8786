"""A job's time line, read back: who did what when, and the same as a Chrome trace.

The format is that of ui.perfetto.dev and chrome://tracing: "Trace Event Format", JSON, of complete events (``X``) and the
metadata events (``M``) that name their rows. A node is a process there, and a rank a thread; what overlaps in one process of a
job, because several of its threads ask at once, gets rows of its own.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kcoord.errors import KcoordError
from kcoord.settings import Settings
from kcoord.telemetry import span_files
from kcoord.telemetry.job_names import directory_name, job_of
from kcoord.telemetry.spans import Process, Span

_TOLERANCE = 1e-6  # seconds: what a float of today's Unix time cannot tell apart


@dataclass(frozen=True)
class JobSeen:
    """A job that has left a time line: its name, when that was written last (Unix seconds), and by how many agents."""

    job: str
    updated: float
    files: int


@dataclass
class Row:
    """One process's spans, in the order of their beginnings."""

    process: Process
    spans: list[Span]


@dataclass
class Timeline:
    """All that is known of a job. `dropped` spans are missing; `problems` are lines about files that could not be read.

    The clocks of the nodes are taken as they are.
    """

    job: str
    rows: list[Row] = field(default_factory=list)
    dropped: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def begin(self) -> float:
        """Unix seconds of the first span's beginning."""
        return min((row.spans[0].begin for row in self.rows), default=0.0)

    @property
    def end(self) -> float:
        return max((s.end for row in self.rows for s in row.spans), default=0.0)

    @property
    def nodes(self) -> list[str]:
        """In the order of their first ranks."""
        return list(dict.fromkeys(row.process.node for row in self.rows))

    @property
    def ranks(self) -> int:
        """Ranks; a process that has none counts as one."""
        with_rank = {(r.process.node, r.process.rank) for r in self.rows if r.process.rank is not None}
        return len(with_rank) + sum(r.process.rank is None for r in self.rows)

    def spans(self) -> Iterator[tuple[Process, Span]]:
        for row in self.rows:
            for span in row.spans:
                yield row.process, span

    def title(self, process: Process) -> str:
        """The row's name: with the pid if the rank has had several processes."""
        if process.rank is None:
            return process.label()
        several = self._processes[process.node, process.rank] > 1
        return f"{process.label()} (pid {process.pid})" if several else process.label()

    @cached_property
    def _processes(self) -> Counter[tuple[str, int | None]]:
        """How many processes each rank has had."""
        return Counter((r.process.node, r.process.rank) for r in self.rows)


def jobs(settings: Settings) -> list[JobSeen]:
    """The jobs that have a time line on this node or in the store, newest first. Raises `KcoordError`."""
    updated: dict[str, float] = {}
    names: dict[str, set[str]] = defaultdict(set)
    for root in span_files.roots(settings.store, settings.local_dir):
        try:
            for path in root.glob(f"*/*{span_files.SUFFIX}"):
                job = job_of(path.parent)
                updated[job] = max(updated.get(job, 0.0), path.stat().st_mtime)
                names[job].add(path.name)
        except OSError as error:
            raise KcoordError(f"{root}: it cannot be read: {error.strerror}") from error
    found = [JobSeen(job, when, len(names[job])) for job, when in updated.items()]
    return sorted(found, key=lambda j: (-j.updated, j.job))


def load_timeline(settings: Settings, job: str) -> Timeline:
    """The time line of `job` from all files of this node and of the store.

    Not guaranteed: that it is whole. An agent writes once a second, and to the store twice a minute and at its end. What cannot
    be read is left out, and `problems` says so. Raises `KcoordError` if there is nothing, naming the jobs that there are. Blocks
    for as long as the file system does.
    """
    timeline = Timeline(job)
    by_process: dict[Process, list[Span]] = defaultdict(list)
    for path in _files(settings, job):
        try:
            found = span_files.read(path)
        except OSError as error:
            timeline.problems.append(f"{path}: it cannot be read: {error.strerror}")
            continue
        if found.problem:
            timeline.problems.append(f"{path}: {found.problem}")
        timeline.dropped += found.dropped
        for process, spans in found.reports:
            by_process[process] += spans
    timeline.rows = _in_order([Row(p, sorted(s, key=lambda s: s.begin)) for p, s in by_process.items()])
    if not timeline.rows and not timeline.problems:
        there = ", ".join(j.job for j in jobs(settings)[:20])
        raise KcoordError(
            f"there is no time line of job {job!r}: {f'there are {there}' if there else 'no job has left one'}"
        )
    return timeline


def _files(settings: Settings, job: str) -> list[Path]:
    """Of two copies of a file the longer one: the store's is made from the node's, some time before or after it is removed."""
    found: dict[str, tuple[int, Path]] = {}
    for root in span_files.roots(settings.store, settings.local_dir):
        try:
            for path in (root / directory_name(job)).glob(f"*{span_files.SUFFIX}"):
                size = path.stat().st_size if path.is_file() else -1
                if size > found.get(path.name, (-1, path))[0]:
                    found[path.name] = size, path
        except OSError as error:
            raise KcoordError(f"{root}: it cannot be read: {error.strerror}") from error
    return [path for _, path in sorted(found.values(), key=lambda f: f[1].name)]


def _in_order(rows: list[Row]) -> list[Row]:
    """Nodes by their lowest rank, then ranks, then as they began."""
    lowest: dict[str, int] = {}
    for row in rows:
        rank = 1 << 60 if row.process.rank is None else row.process.rank
        lowest[row.process.node] = min(rank, lowest.get(row.process.node, rank))

    def place(row: Row) -> tuple[Any, ...]:
        p = row.process
        return lowest[p.node], p.node, p.rank is None, p.rank or 0, row.spans[0].begin, p.pid

    return sorted(rows, key=place)


def lanes(spans: Iterable[Span], *, nested: bool) -> list[list[Span]]:
    """`spans`, which are in the order of their beginnings, in as few rows as hold them without an overlap.

    `nested`: one that lies wholly within another may share its row.
    """
    rows: list[list[Span]] = []
    open_until: list[list[float]] = []  # for each row, the ends of the spans that are open there, outermost first
    for span in spans:
        for row, ends in zip(rows, open_until, strict=True):
            while ends and ends[-1] <= span.begin + _TOLERANCE:
                ends.pop()
            if not ends or (nested and span.end <= ends[-1]):
                row.append(span)
                ends.append(span.end)
                break
        else:
            rows.append([span])
            open_until.append([span.end])
    return rows


def chrome_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The trace's events; times are in microseconds since the job's first span began."""
    begin, thread = timeline.begin, 0
    numbers = {node: n for n, node in enumerate(timeline.nodes, 1)}
    for node, pid in numbers.items():
        yield _metadata("process_name", pid, 0, name=node)
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    for row in timeline.rows:
        pid, title = numbers[row.process.node], timeline.title(row.process)
        for lane, spans in enumerate(lanes(row.spans, nested=True)):
            thread += 1
            yield _metadata("thread_name", pid, thread, name=title if lane == 0 else f"{title}, at the same time")
            yield _metadata("thread_sort_index", pid, thread, sort_index=thread)
            for span, (start, end) in zip(spans, _microseconds(spans, begin), strict=True):
                yield _complete(span, row.process, start, end, pid, thread)


def write_chrome(timeline: Timeline, write: Any) -> int:
    """Write the whole trace through ``write(text)``, piece by piece; returns the number of spans."""
    about = {"job": timeline.job, "begin_unix_seconds": timeline.begin, "dropped_spans": timeline.dropped}
    write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [')
    spans, separator = 0, "\n"
    for event in chrome_events(timeline):
        spans += event["ph"] == "X"
        write(separator + json.dumps(event))
        separator = ",\n"
    write("\n]}\n")
    return spans


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _microseconds(spans: list[Span], origin: float) -> Iterator[tuple[int, int]]:
    """Begin and end of each span of a row; what touches does not overlap, however it is rounded: viewers want it so."""
    ends: list[int] = []
    for span in spans:
        begin, end = int((span.begin - origin) * 1e6), int((span.end - origin) * 1e6)
        while ends and ends[-1] <= begin + 2:
            begin = max(begin, ends.pop())
        end = max(begin, min([end, *ends[-1:]]))
        ends.append(end)
        yield begin, end


def _complete(span: Span, process: Process, begin: int, end: int, pid: int, tid: int) -> dict[str, Any]:
    args: dict[str, Any] = {"key": span.key, "backend": span.backend, "outcome": span.outcome, "rank_pid": process.pid}
    if span.saved:
        args["saved_seconds"] = round(span.saved, 6)
    if span.note:
        args["note"] = span.note
    event = {"ph": "X", "name": span.name, "cat": span.kind, "ts": begin, "dur": end - begin, "pid": pid, "tid": tid}
    return {**event, "args": args}
