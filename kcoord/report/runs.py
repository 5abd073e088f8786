"""The run that compiled an artifact, and the artifacts of earlier runs. A manifest names a process and a time, and no run.

So a run is derived from the time lines of jobs. It is the processes of one job that worked at the same time, directly or through
others, and further ranks that begin up to a minute later. A rank that begins again when all have ended begins the next run. Of a
job without a name the processes of one node count alone: the jobs of other users have no names either. Without a time line (it is
kept for a week on a node, and for 30 days in a store) a run is what one process compiled.

Not guaranteed: that artifacts of one run are known as such; without a time line those of other ranks are not. Nor that two runs
are told apart: those at the same time of one job's name are not, nor those of two containers whose processes have equal pids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from kcoord.artifacts.manifest import Manifest
from kcoord.errors import KcoordError
from kcoord.protocol.identity import UNNAMED
from kcoord.report.differences import nearest
from kcoord.report.timeline import Row, Timeline, files_of, jobs, load_timeline
from kcoord.settings import Settings
from kcoord.telemetry.span_files import LARGEST_FILE
from kcoord.telemetry.spans import KEY_DIGITS

_MOST_JOBS, _MOST_FILES = 200, 2000  # that are searched, and of each job
_LATE = 60.0  # seconds from one rank's last span to another's first, in one run
_CLOCKS = 60.0  # seconds by which a file server's clock may be behind


def relative_of(settings: Settings, found: Iterable[Manifest], mine: Manifest) -> tuple[Manifest | None, bool]:
    """The artifact of an earlier run whose key differs least from `mine`, and False.

    If there is none: the one of the same run that is older than `mine` and differs least, and True.
    """
    older = [m for m in found if m.origin.created <= mine.origin.created]
    if nearest(older, mine) is None:
        return None, False
    began = run_began(settings, older, mine)
    theirs = nearest([m for m in older if m.origin.created < began], mine)
    return (theirs, False) if theirs is not None else (nearest(older, mine), True)


def run_began(settings: Settings, found: Iterable[Manifest], mine: Manifest) -> float:
    """Unix seconds of the first compile, wait or load of the run that compiled `mine`, as far as it is known.

    `found` are other artifacts, of all kernels.
    """
    with suppress(KcoordError, OSError):  # time lines that cannot be read
        began = _by_time_lines(settings, mine)
        if began is not None:
            return began
    origin = mine.origin
    same = [m for m in found if m.origin[:3] == origin[:3] and m.origin.created <= origin.created] if origin.pid else []
    return min(m.origin.created - m.compile_seconds for m in [*same, mine])


def _by_time_lines(settings: Settings, mine: Manifest) -> float | None:
    """By the first job whose time line has the compile of `mine`: a later one may have compiled it again."""
    since = mine.origin.created - _CLOCKS
    known = sorted((job for job in jobs(settings) if job.updated >= since), key=lambda job: job.updated)
    for job in known[:_MOST_JOBS]:
        if any(_names(path, mine) for path in files_of(settings, job.job, since, [])[:_MOST_FILES]):
            began = _began(load_timeline(settings, job.job), mine)
            if began is not None:
                return began
    return None


def _names(path: Path, mine: Manifest) -> bool:
    """True if the span file has `mine`'s key. Searching a file is cheaper than decoding it."""
    try:
        with path.open("rb") as file:
            return mine.key.digest[:KEY_DIGITS].encode() in file.read(LARGEST_FILE)
    except OSError:
        return False


def _began(timeline: Timeline, mine: Manifest) -> float | None:
    """The beginning of the run that made `mine`; None if the time line does not have its compile."""
    found: tuple[float, Row] | None = None
    for row in timeline.rows:
        for span in row.spans:
            is_it = span.compiled and mine.key.digest.startswith(span.key) and span.begin <= mine.origin.created
            if is_it and (found is None or span.begin > found[0]):
                found = span.begin, row
    if found is None:
        return None
    rows = [r for r in timeline.rows if timeline.job != UNNAMED or r.process.node == found[1].process.node]
    return next(run[0].spans[0].begin for run in _runs(rows) if any(row is found[1] for row in run))


def _runs(rows: list[Row]) -> Iterator[list[Row]]:
    """The processes of each run, in the order of their beginnings."""
    run: list[Row] = []
    end = 0.0
    for row in sorted(rows, key=lambda row: row.spans[0].begin):
        begin, rank = row.spans[0].begin, row.process.rank
        is_further = rank is not None and rank not in {r.process.rank for r in run} and begin <= end + _LATE
        if run and begin > end and not is_further:
            yield run
            run = []
        run.append(row)
        end = max(end, *(span.end for span in row.spans))
    if run:
        yield run
