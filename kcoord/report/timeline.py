"""A job's time line: the spans of its processes, from the span files of this node and the store."""

from __future__ import annotations

import stat
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from kcoord.errors import KcoordError
from kcoord.report.span_reader import read
from kcoord.settings import Settings
from kcoord.telemetry import span_files
from kcoord.telemetry.figures import Sums, figures
from kcoord.telemetry.spans import KINDS, Process, Span, directory_name, job_of, plain_text
from kcoord.units import first_few

_MOST_NAMED = 20  # jobs in an error's line
_MOST_PROBLEMS = 3  # in an error's line
_LONGEST_PATH = 1000


@dataclass(frozen=True)
class JobSeen:
    """A job with a time line. `updated`: Unix seconds of its last write."""

    job: str
    updated: float


@dataclass
class Row:
    """One process's spans, in the order of their beginnings."""

    process: Process
    spans: list[Span]


@dataclass
class Timeline:
    """`hits` are spans without time: hits in memory, parts that are not hooked. `dropped` spans are missing; `problems` are lines
    about files that could not be read.

    Each node's clock is taken as it is.
    """

    job: str
    rows: list[Row] = field(default_factory=list)
    hits: list[tuple[Process, Span]] = field(default_factory=list)
    dropped: int = 0
    problems: list[str] = field(default_factory=list)

    @cached_property
    def figures(self) -> Sums:
        return figures(chain(self.spans(), self.hits), self.dropped)

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
        """The number of ranks; a process without a rank counts as one, unless it is the pool's."""
        others = [row.process for row in self.rows if not row.process.pool]
        return len({(p.node, p.pid if p.rank is None else None, p.rank) for p in others})

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
        """The number of processes that each rank has had."""
        return Counter((r.process.node, r.process.rank) for r in self.rows)


def jobs(settings: Settings) -> list[JobSeen]:
    """The jobs with a time line on this node or in the store, newest first. Raises `KcoordError`.

    Directories that cannot be read are left out: others write to the store, too.
    """
    updated: dict[str, float] = {}
    for root in span_files.roots(settings.store_root, settings.local_dir):
        for directory in _listed(root):
            job = job_of(directory)
            try:
                found = [p for p in directory.iterdir() if p.suffix == span_files.SUFFIX]
                # copies are renamed into the store's directory, which changes it; a node's own few files grow
                files = [directory] if root != settings.local_dir / "traces" else found
                times = [path.stat().st_mtime for path in files]
            except OSError:  # not a directory, another user's, or being removed
                continue
            if found:
                updated[job] = max(updated.get(job, 0.0), *times)
    return sorted((JobSeen(j, when) for j, when in updated.items()), key=lambda j: (-j.updated, j.job))


def load_timeline(settings: Settings, job: str, since: float = 0.0) -> Timeline:
    """The part of `job`'s time line that began after `since` (Unix seconds).

    Raises `KcoordError` if nothing can be read; if there is nothing, it names the jobs with a time line. Blocks for as long as
    the file system does.
    Not guaranteed: completeness. An agent writes once a second, and to the store twice a minute and at its end. Files that cannot
    be read are left out, and `problems` says so.
    """
    timeline = Timeline(job)
    by_process: dict[Process, set[Span]] = defaultdict(set)  # a delivery that was sent again is there twice
    files = _files_of(settings, job, since, timeline.problems)
    for path in files:
        try:
            found = read(path)
        except OSError as error:
            timeline.problems.append(_unreadable(path, error))
            continue
        if found.problem:
            timeline.problems.append(f"{_shown(path)}: {found.problem}")
        timeline.dropped += found.dropped
        for process, spans in found.deliveries:
            by_process[process].update(s for s in spans if s.begin >= since)
    drawn = {p: sorted((s for s in spans if s.kind in KINDS), key=lambda s: s.begin) for p, spans in by_process.items()}
    timeline.rows = _in_order([Row(p, spans) for p, spans in drawn.items() if spans])
    timeline.hits = [(p, s) for p, spans in by_process.items() for s in spans if s.kind not in KINDS]
    if not timeline.rows and not timeline.hits:
        if timeline.problems:
            raise KcoordError(
                f"nothing of job {plain_text(job)!r} could be read: {first_few(timeline.problems, _MOST_PROBLEMS)}"
            )
        if since:
            raise KcoordError(f"job {job!r} has left nothing in that time: ask for more --hours")
        raise KcoordError(_nothing(settings, job, bool(files)))
    return timeline


def _listed(root: Path) -> list[Path]:
    """The entries of `root`; nothing if it does not exist. Raises `KcoordError`."""
    try:
        return list(root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise KcoordError(f"{root}: it cannot be read: {error.strerror}") from error


def _files_of(settings: Settings, job: str, since: float, problems: list[str]) -> list[Path]:
    """The files that were written after `since`. The store's copy of a file counts only if this node has the file no more."""
    found: dict[str, Path] = {}
    for root in span_files.roots(settings.store_root, settings.local_dir):
        try:
            entries = _listed(root / directory_name(job))
        except KcoordError as error:
            problems.append(str(error))
            continue
        for path in entries:
            if path.suffix != span_files.SUFFIX:
                continue
            try:
                status = path.stat()
            except FileNotFoundError:  # it was removed this moment
                continue
            except OSError as error:
                problems.append(_unreadable(path, error))
                continue
            if stat.S_ISREG(status.st_mode) and status.st_mtime >= since:
                found.setdefault(path.name, path)
    return [path for _, path in sorted(found.items())]


def _shown(path: Path) -> str:
    return plain_text(str(path), _LONGEST_PATH)


def _unreadable(path: Path, error: OSError) -> str:
    return f"{_shown(path)}: it cannot be read: {error.strerror}"


def _nothing(settings: Settings, job: str, begun: bool) -> str:
    if begun:
        return f"the time line of job {job!r} has nothing in it yet: its agents write once a second"
    names = [plain_text(j.job) for j in jobs(settings)]
    if names:
        return f"there is no time line of job {job!r}; these jobs have one: {first_few(names, _MOST_NAMED)}"
    where = "in the store and on this node" if settings.store else "on this node, and KCOORD_STORE (--store) is not set"
    return f"there is no time line of job {job!r}: no job has left one {where}"


def _in_order(rows: list[Row]) -> list[Row]:
    """Nodes by their lowest rank, then ranks, then processes as they began."""
    lowest: dict[str, int] = {}
    for row in rows:
        rank = 1 << 60 if row.process.rank is None else row.process.rank
        lowest[row.process.node] = min(rank, lowest.get(row.process.node, rank))

    def place(row: Row) -> tuple[Any, ...]:
        p = row.process
        return lowest[p.node], p.node, p.pool, p.rank is None, p.rank or 0, row.spans[0].begin, p.pid

    return sorted(rows, key=place)
