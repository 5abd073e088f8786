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
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.resources import files

import kcoord
from kcoord.report.comparison import Comparison
from kcoord.report.divergence import Divergence
from kcoord.report.drawing import drawing
from kcoord.report.findings import Findings
from kcoord.report.misses import Miss
from kcoord.report.sections import sections
from kcoord.report.tables import first_few, percent, seconds, several
from kcoord.report.timeline import Timeline
from kcoord.telemetry.spans import KINDS, plain_text

_LONGEST_PROBLEM = 1200
_MOST_CLOCKS = 5  # nodes
_SWATCHES = {
    "compile": "M0 0h22v14h-22z",
    "wait": "M0 4h22v6h-22z",
    "fetch": "M0 0h22v6h-22z",
    "load": "M0 8h22v6h-22z",
    "failed": "M0 0h4l-4 6zM8 0h5l-8 14h-5zM17 0h5v1l-8 13h-5zM22 8v6h-4z",
}


def page(
    timeline: Timeline,
    found: Findings,
    misses: Sequence[Miss],
    divergences: Sequence[Divergence] = (),
    comparison: Comparison | None = None,
) -> str:
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
        "when": escape(_when(timeline)),
        "sentence": escape(_sentence(timeline, found) + _of_divergences(divergences)),
        "figures": "".join(
            f"<div><dt>{escape(t)}</dt><dd>{escape(v)}</dd></div>" for t, v in _figures(timeline, found)
        ),
        "notes": _notes(timeline, found),
        "legend": _legend(found),
        "canvas_label": escape(label, quote=True),
        "caption": _caption(left_out),
        "sections": sections(timeline, found, misses, divergences, comparison),
        "footer": escape(f"Written by kcoord {kcoord.__version__} on {_date(time.time())}."),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = resources.joinpath("report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def waiting_share(timeline: Timeline, found: Findings) -> float:
    """All waits, as a share of the ranks × the seconds of the episodes."""
    rank_seconds = timeline.ranks * sum(end - begin for begin, end in found.episodes)
    return min(1.0, found.wait_seconds / rank_seconds) if rank_seconds > 0 else 0.0


def _when(timeline: Timeline) -> str:
    same_day = time.gmtime(timeline.begin)[:3] == time.gmtime(timeline.end)[:3]
    end = time.strftime("%H:%M:%S UTC", time.gmtime(timeline.end)) if same_day else _date(timeline.end)
    begin = _date(timeline.begin).removesuffix(" UTC") if same_day else _date(timeline.begin)
    return f"{begin} to {end}"


def _date(when: float) -> str:
    return time.strftime("%-d %B %Y, %H:%M:%S UTC", time.gmtime(when))


def _sentence(timeline: Timeline, found: Findings) -> str:
    n = len(found.compiled)
    failed, lost = sum(bool(k.failures) for k in found.kernels), sum(bool(k.lost) for k in found.kernels)
    if not timeline.rows:
        return "None of this job's files could be read."
    if not n:
        text = "Nothing was compiled." if failed or lost else "Nothing had to be compiled."
    else:
        once = "" if found.duplicates else ", each once," if n > 1 else ", once,"
        text = f"{several(n, 'kernel was', 'kernels were')} compiled{once} in {seconds(found.compile_seconds)} of compiling."
    if found.duplicates:
        text += f" {several(len(found.duplicates), 'of them was', 'of them were')} compiled more than once."
    if failed:
        text += f" {several(failed, 'kernel')} failed to compile."
    if lost:
        text += f" {several(lost, 'kernel')} had a compile that was lost with its process."
    if found.loads:
        text += f" {several(found.loads, 'load')} saved {seconds(found.saved_seconds)} of compiling."
    if timeline.ranks > 1:
        text += f" The ranks waited for one another {percent(waiting_share(timeline, found))} of the time."
    return text


def _figures(timeline: Timeline, found: Findings) -> list[tuple[str, str]]:
    nodes, parts = len(timeline.nodes), len(found.episodes)
    in_parts = "" if parts == 1 else f", in {parts} parts"
    return [
        ("node" if nodes == 1 else "nodes", f"{nodes:,}"),
        ("rank" if timeline.ranks == 1 else "ranks", f"{timeline.ranks:,}"),
        (f"from the first request to the last{in_parts}", seconds(timeline.end - timeline.begin)),
        ("compiles", f"{found.compiles:,}"),
        ("spent compiling", seconds(found.compile_seconds)),
        *([("compiled ahead by the pool", _share_used(found))] if found.ahead else []),
        ("of compiling saved", seconds(found.saved_seconds)),
        ("of the ranks' time waiting", percent(waiting_share(timeline, found))),
    ]


def _share_used(found: Findings) -> str:
    return f"{len(found.ahead):,} ({sum(bool(k.loads) for k in found.ahead):,} used)"


def _notes(timeline: Timeline, found: Findings) -> str:
    notes = []
    if timeline.dropped:
        notes.append(f"{several(timeline.dropped, 'span is', 'spans are')} missing: there were more than are kept.")
    notes += [f"Not read: {plain_text(problem, _LONGEST_PROBLEM)}." for problem in timeline.problems[:10]]
    if len(timeline.problems) > 10:
        notes.append(f"{len(timeline.problems) - 10} more files were not read.")
    notes += _clocks(found.clocks)
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if notes else ""


def _clocks(differences: Sequence[tuple[str, str, float]]) -> list[str]:
    """A line for each node whose clock differs; the node that differs from the most others first."""
    notes: list[str] = []
    left = list(differences)
    while left and len(notes) < _MOST_CLOCKS:
        ahead, behind = Counter(a for a, _, _ in left), Counter(b for _, b, _ in left)
        (early, earlier), (late, later) = ahead.most_common(1)[0], behind.most_common(1)[0]
        if later >= earlier:
            node, how, others = late, "behind", {a: by for a, b, by in left if b == late}
        else:
            node, how, others = early, "ahead of", {b: by for a, b, by in left if a == early}
        left = [pair for pair in left if node not in pair[:2]]
        named = first_few(list(others), 3)
        that = "that" if len(others) == 1 else "those"
        notes.append(
            f"The clock of {node} is at least {seconds(max(others.values()))} {how} {that} of {named}: by these clocks a wait "
            "ended before its compile. Each row is drawn by its own node's clock."
        )
    if left:
        notes.append("The clocks of more nodes differ.")
    return notes


def _legend(found: Findings) -> str:
    items = []
    for kind in reversed(KINDS):
        count = found.count_of.get(kind, 0)
        text = f"{count:,}, {seconds(found.seconds_of[kind])}" if count else "none"
        items.append(_swatch(kind) + escape(f"{kind.capitalize()}: {text}"))
    in_vain = [span.seconds for k in found.kernels for _, span in (*k.failures, *k.lost)]
    if in_vain:
        items.append(
            _swatch("failed") + escape(f"Compile that failed or was lost: {len(in_vain):,}, {seconds(sum(in_vain))}")
        )
    return "".join(f"<li>{item}</li>" for item in items)


def _swatch(name: str) -> str:
    path = f'<path fill="var(--{name})" d="{_SWATCHES[name]}"/>'
    return f'<svg width="22" height="14" viewBox="0 0 22 14" aria-hidden="true">{path}</svg>'


def _caption(left_out: int) -> str:
    hands = (
        "Drag over a part to zoom in, double-click to see all of it; Shift and drag, or the arrow keys, move; Ctrl and the "
        "wheel, or + and −, zoom."
    )
    text = (
        "Each span is at least one pixel wide. Where several fall on one pixel a failure is drawn first, then a compile, a "
        "wait, a fetch, a load. Times are by each node's own clock."
    )
    if left_out:
        text += f" {left_out:,} spans, the shortest loads first, are not drawn; the sums and tables have them."
    return f'A row for each rank. <span class="screen">{hands}</span> {escape(text)}'


def _of_divergences(divergences: Sequence[Divergence]) -> str:
    n = len({id(kernel) for d in divergences if not d.expected for kernel in d.kernels})
    if not n:
        return ""
    kernels = several(n, "kernel was", "kernels were")
    keys = "its key differs" if n == 1 else "their keys differ"
    return f" {kernels} not shared by all ranks, because {keys} between ranks that are to agree: see below."
