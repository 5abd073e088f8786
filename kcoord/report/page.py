"""A job's report: one HTML page that needs nothing but itself.

The page may hold any text that a rank has sent. Every text is escaped. Data travels as JSON without a ``<``, and the script puts
it into the page as text only. The page's own policy lets no other script run and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Sequence
from html import escape
from importlib.resources import files

import kcoord
from kcoord.report.differences import Divergence
from kcoord.report.drawing import drawing
from kcoord.report.findings import Findings
from kcoord.report.sections import sections
from kcoord.report.tables import percent, seconds, several
from kcoord.report.timeline import Timeline
from kcoord.telemetry.spans import plain_text

_LONGEST_PROBLEM = 1200
_MOST_PROBLEMS = 10


def page(timeline: Timeline, found: Findings, divergences: Sequence[Divergence] = ()) -> str:
    """The report of a job as an HTML page."""
    resources = files("kcoord.report")
    script = resources.joinpath("report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    data, left_out = drawing(timeline, found)
    job = plain_text(timeline.job)
    label = f"The time line of job {job}: {len(timeline.rows)} rows; the tables below have its content."
    values = {
        "script_hash": f"sha256-{digest}",
        "script": script,
        "title": escape(f"kcoord: job {job}"),
        "heading": escape(f"Job {job}"),
        "when": f"{_date(timeline.begin)} to {_date(timeline.end)}",
        "sentence": escape(_sentence(found, divergences)),
        "figures": "".join(
            f"<div><dt>{escape(t)}</dt><dd>{escape(v)}</dd></div>" for t, v in _figures(timeline, found)
        ),
        "notes": "".join(f"<li>{escape(note)}</li>" for note in _notes(timeline, left_out)),
        "canvas_label": escape(label, quote=True),
        "sections": sections(timeline, found, divergences),
        "footer": escape(f"Written by kcoord {kcoord.__version__} on {_date(time.time())}."),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = resources.joinpath("report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def waiting_share(timeline: Timeline, found: Findings) -> float:
    """All waits, as a share of the ranks × the seconds of the episodes."""
    rank_seconds = timeline.ranks * sum(end - begin for begin, end in found.episodes)
    return min(1.0, timeline.figures["wait_seconds"] / rank_seconds) if rank_seconds > 0 else 0.0


def _date(when: float) -> str:
    return time.strftime("%-d %B %Y, %H:%M:%S UTC", time.gmtime(when))


def _sentence(found: Findings, divergences: Sequence[Divergence]) -> str:
    again, failed = len(found.duplicates), len(found.failures)
    apart = len({key for each in divergences for key in each.kernels})
    text = f"{several(len(found.compiled), 'kernel')} compiled{', each once' if found.compiled and not again else ''}."
    if again:
        text += f" {several(again, 'kernel')} compiled more than once."
    if failed:
        text += f" {several(failed, 'kernel')} failed to compile, or lost the compiling process."
    if apart:
        text += (
            f" {several(apart, 'kernel')} not shared by all ranks, because keys differ that should agree: see below."
        )
    return text


def _figures(timeline: Timeline, found: Findings) -> list[tuple[str, str]]:
    parts = f", in {len(found.episodes)} parts" if len(found.episodes) > 1 else ""
    sums = timeline.figures
    loads = sum(sums[name] for name in ("memory_hits", "local_hits", "store_hits", "waits"))
    return [
        ("nodes", f"{len(timeline.nodes):,}"),
        ("ranks", f"{timeline.ranks:,}"),
        (f"from the first request to the last{parts}", seconds(timeline.end - timeline.begin)),
        ("requests", f"{sums['requests']:,}"),
        ("kernels", f"{sums['kernels']:,}"),
        ("compiles", f"{sums['compiles']:,}"),
        ("spent compiling", seconds(sums["compile_seconds"])),
        *(
            [("compiled ahead by the pool", f"{sums['ahead']:,} ({sums['ahead_used']:,} used)")]
            if sums["ahead"]
            else []
        ),
        ("loads", f"{loads:,}"),
        ("of compiling saved", seconds(sums["saved_seconds"])),
        ("of the ranks' time waiting", percent(waiting_share(timeline, found))),
    ]


def _notes(timeline: Timeline, left_out: int) -> list[str]:
    notes = [f"Not read: {plain_text(problem, _LONGEST_PROBLEM)}." for problem in timeline.problems[:_MOST_PROBLEMS]]
    if len(timeline.problems) > _MOST_PROBLEMS:
        notes.append(f"{len(timeline.problems) - _MOST_PROBLEMS} more files were not read.")
    if timeline.dropped:
        notes.append(f"{several(timeline.dropped, 'span')} missing: there were more than are kept.")
    if left_out:
        notes.append(f"{left_out:,} spans, the shortest, are not drawn; the sums and tables have them.")
    return notes
