"""A job's time line, read back: who did what when, and the same as a Chrome trace.

The format is that of ui.perfetto.dev and chrome://tracing: "Trace Event Format", JSON, of complete events (``X``) and the
metadata events (``M``) that name their rows. A node is a process there, and a rank a thread; what overlaps in one process of a
job, because several of its threads ask at once, gets rows of its own.
"""

from __future__ import annotations

import json
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from kcoord.errors import KcoordError
from kcoord.settings import Settings
from kcoord.telemetry import span_files
from kcoord.telemetry.job_names import directory_name, job_of
from kcoord.telemetry.span_files import Said, SpanFile
from kcoord.telemetry.spans import Process, Span, plain_text

_TOLERANCE = 1e-6  # seconds: what a float of today's Unix time cannot tell apart
_MOST_NAMED = 20  # jobs in an error's line
_LONGEST_PATH = 1000
_MOST_LANES_SEARCHED = 32


@dataclass(frozen=True)
class JobSeen:
    """A job that has left a time line: its name, when that was written last (Unix seconds), and in how many files: one of each
    agent, and of each process that needed none.
    """

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
    said: list[Said] = field(default_factory=list)
    """What the agents said of themselves, in the order of time."""

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

    def with_short_names(self) -> Timeline:
        """The same, its nodes named without the domain that all of them share: ``gpu-3``, not ``gpu-3.cluster.example.com``."""
        short = {node: node.partition(".")[0] for node in self.nodes}
        if len({node.partition(".")[2] for node in short}) != 1 or "" in short.values():
            return self  # of one domain no two have the same first part
        rows = [Row(replace(row.process, node=short[row.process.node]), row.spans) for row in self.rows]
        said = [replace(s, node=short.get(s.node, s.node)) for s in self.said]
        return Timeline(self.job, rows, self.dropped, self.problems, said)

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
    """The jobs that have a time line on this node or in the store, newest first. Raises `KcoordError`.

    What cannot be read, in a store that others write to, is left out.
    """
    updated: dict[str, float] = {}
    names: dict[str, set[str]] = defaultdict(set)
    for root in span_files.roots(settings.store_root, settings.local_dir):
        for directory in _listed(root):
            job = job_of(directory)
            try:
                found = [p for p in directory.iterdir() if p.suffix == span_files.SUFFIX]
                # copies are renamed into the store's directory, which changes it; a node's own few files grow
                files = [directory] if root != settings.local_dir / "traces" else found
                written = [path.stat().st_mtime for path in files]
            except OSError:  # not a directory, another user's, or being removed
                continue
            if found:
                names[job].update(p.name for p in found)
                updated[job] = max(updated.get(job, 0.0), *written)
    return sorted((JobSeen(j, when, len(names[j])) for j, when in updated.items()), key=lambda j: (-j.updated, j.job))


def _listed(root: Path) -> list[Path]:
    """What is in `root`; nothing if it is not there. Raises `KcoordError`."""
    try:
        return list(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise KcoordError(f"{root}: it cannot be read: {error.strerror}") from error


def load_timeline(settings: Settings, job: str, since: float = 0.0) -> Timeline:
    """The time line of `job` from all files of this node and of the store; of it what began after `since` (Unix seconds).

    Not guaranteed: that it is whole. An agent writes once a second, and to the store twice a minute and at its end. What cannot
    be read is left out, and `problems` says so. Raises `KcoordError` if there is nothing, naming the jobs that there are. Blocks
    for as long as the file system does.
    """
    timeline = Timeline(job)
    by_process: dict[Process, list[Span]] = defaultdict(list)
    agents: list[SpanFile] = []
    files = _files(settings, job, since, timeline.problems)
    for path in files:
        name = plain_text(str(path), _LONGEST_PATH)
        try:
            found = span_files.read(path)
        except OSError as error:
            timeline.problems.append(f"{name}: it cannot be read: {error.strerror}")
            continue
        if found.problem:
            timeline.problems.append(f"{name}: {found.problem}")
        timeline.dropped += found.dropped
        agents.append(found)
        for process, spans in found.reports:
            by_process[process] += spans if not since else [s for s in spans if s.begin >= since]
    timeline.said = [said for said in _said(agents) if said.when >= since]
    timeline.rows = _in_order([Row(p, sorted(s, key=lambda s: s.begin)) for p, s in by_process.items() if s])
    if not timeline.rows and not timeline.problems:
        if since:
            raise KcoordError(f"job {job!r} has left nothing in that time: ask for more --hours")
        raise KcoordError(_nothing(settings, job, bool(files)))
    return timeline


def _said(files: list[SpanFile]) -> list[Said]:
    """In the order of time; and of an agent that was followed by another one of its node, that it did not say that it ends."""
    found = [said for file in files for said in file.said]
    began: dict[str, float] = {}  # when a node's last agent did
    for said in found:
        if said.what == "begins":
            began[said.node] = max(said.when, began.get(said.node, 0.0))
    for file in files:
        first = next((said for said in file.said if said.what == "begins"), None)
        if first is None or first.when == began[first.node] or any(said.what == "ends" for said in file.said):
            continue
        last = max([*(s.end for _, spans in file.reports for s in spans), *(said.when for said in file.said)])
        agent = first.text.removesuffix(" began")
        text = f"{agent} has not said that it ends: this is the last that is known of it, and its node has another one"
        found.append(Said(last, first.node, text))
    return sorted(found, key=lambda said: said.when)


def _nothing(settings: Settings, job: str, begun: bool) -> str:
    if begun:
        return f"the time line of job {job!r} has nothing in it yet: its agents write what its ranks did once a second"
    there = [plain_text(j.job) for j in jobs(settings)]
    if not there:
        where = (
            "in the store and on this node" if settings.store else "on this node, and KCOORD_STORE (--store) is not set"
        )
        return f"there is no time line of job {job!r}: no job has left one {where}"
    more = f" and {len(there) - _MOST_NAMED} more" if len(there) > _MOST_NAMED else ""
    return f"there is no time line of job {job!r}; these jobs have one: {', '.join(there[:_MOST_NAMED])}{more}"


def _files(settings: Settings, job: str, since: float, problems: list[str]) -> list[Path]:
    """Those that were written after `since`; of two copies the longer one: the store's is made from the node's, some time before
    or after that is removed.
    """
    found: dict[str, tuple[int, Path]] = {}
    for root in span_files.roots(settings.store_root, settings.local_dir):
        try:
            there = _listed(root / directory_name(job))
        except KcoordError as error:
            problems.append(str(error))
            continue
        for path in there:
            if path.suffix != span_files.SUFFIX:
                continue
            try:
                about = path.stat()
            except FileNotFoundError:  # it has been removed this very moment
                continue
            except OSError as error:
                problems.append(f"{plain_text(str(path), _LONGEST_PATH)}: it cannot be read: {error.strerror}")
                continue
            longer = about.st_size > found.get(path.name, (-1, path))[0]
            if stat.S_ISREG(about.st_mode) and about.st_mtime >= since and longer:
                found[path.name] = about.st_size, path
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
    free: list[int] = []  # rows with nothing open
    busy: list[tuple[float, int]] = []  # the other rows, by the end of their outermost span
    for span in spans:
        while busy and busy[0][0] <= span.begin + _TOLERANCE:
            heappush(free, heappop(busy)[1])
        around = _row_around(span, open_until, free[0] if free else len(rows)) if nested else None
        if around is not None:
            open_until[around].append(span.end)
            rows[around].append(span)
            continue
        if not free:
            rows.append([])
            open_until.append([])
            free.append(len(rows) - 1)
        row = heappop(free)
        heappush(busy, (span.end, row))
        open_until[row] = [span.end]
        rows[row].append(span)
    return rows


def _row_around(span: Span, open_until: list[list[float]], before: int) -> int | None:
    """The first row, before row `before`, with a span that `span` lies within."""
    for row, ends in enumerate(open_until[: min(before, _MOST_LANES_SEARCHED)]):
        while ends and ends[-1] <= span.begin + _TOLERANCE:
            ends.pop()
        if ends and span.end <= ends[-1]:
            return row
    return None


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
    for said in timeline.said:
        if said.node in numbers:
            when = max(0, int((said.when - begin) * 1e6))
            event = {"ph": "i", "s": "p", "name": said.text, "cat": "agent", "ts": when}
            yield {**event, "pid": numbers[said.node], "tid": 0, "args": {}}


def write_chrome(timeline: Timeline, write: Any) -> int:
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
