"""A job's time line as a Chrome trace, for ui.perfetto.dev and chrome://tracing.

The format is the "Trace Event Format" in JSON: complete events (``X``), and metadata events (``M``) that name the rows. A node is
a process there and a rank a thread. Spans that overlap in one process of a job, because several of its threads ask at once, get
rows of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import Any

from kcoord.report.timeline import Timeline
from kcoord.telemetry.spans import Process, Span, plain_text

_TOLERANCE = 1e-6  # seconds; the resolution of a float at today's Unix time


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """`spans`, sorted by their beginnings, in as few rows as hold them without an overlap."""
    rows: list[list[Span]] = []
    free: list[int] = []  # rows that a span may be added to
    busy: list[tuple[float, int]] = []  # the other rows, by the end of their last span
    for span in spans:
        while busy and busy[0][0] <= span.begin + _TOLERANCE:
            heappush(free, heappop(busy)[1])
        if not free:
            rows.append([])
            free.append(len(rows) - 1)
        row = heappop(free)
        heappush(busy, (span.end, row))
        rows[row].append(span)
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
        for lane, spans in enumerate(lanes(row.spans)):
            thread += 1
            yield _metadata("thread_name", pid, thread, name=title if lane == 0 else f"{title}, at the same time")
            yield _metadata("thread_sort_index", pid, thread, sort_index=thread)
            for span, (start, end) in zip(spans, _microseconds(spans, begin), strict=True):
                yield _complete(span, row.process, start, end, pid, thread)


def write_chrome(timeline: Timeline, write: Callable[[str], object]) -> int:
    """Write the whole trace through ``write(text)``, piece by piece; returns the number of spans."""
    about = {"job": plain_text(timeline.job), "begin_unix_seconds": timeline.begin, "dropped_spans": timeline.dropped}
    write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [')
    spans, separator = 0, "\n"
    for event in chrome_events(timeline):
        spans += event["ph"] == "X"
        write(separator + json.dumps(event))
        separator = ",\n"
    write("\n]}\n")
    return spans


def _metadata(event: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _microseconds(spans: list[Span], origin: float) -> Iterator[tuple[int, int]]:
    """Begin and end of each span of a row. Spans that touch do not overlap after rounding, as viewers require."""
    end = 0
    for span in spans:
        begin = max(end, int((span.begin - origin) * 1e6))
        end = max(begin, int((span.end - origin) * 1e6))
        yield begin, end


def _complete(span: Span, process: Process, begin: int, end: int, pid: int, tid: int) -> dict[str, Any]:
    args: dict[str, Any] = {"key": span.key, "backend": span.backend, "outcome": span.outcome, "rank_pid": process.pid}
    if span.saved:
        args["saved_seconds"] = round(span.saved, 6)
    if span.note:
        args["note"] = span.note
    event = {"ph": "X", "name": span.name, "cat": span.kind, "ts": begin, "dur": end - begin, "pid": pid, "tid": tid}
    return {**event, "args": args}
