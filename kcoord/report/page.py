"""A job's report: one HTML page that needs nothing but itself.

The page may hold any text that a rank has sent. Every text is escaped. Data travels as JSON without a ``<``, and the script puts
it into the page as text only. The page's own policy lets no other script run and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import time
from array import array
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import kcoord
from kcoord.report.differences import Divergence
from kcoord.report.findings import Findings, Kernel, places, why_again
from kcoord.report.timeline import Row, Timeline
from kcoord.report.trace import lanes
from kcoord.telemetry.figures import asides
from kcoord.telemetry.spans import KINDS, OUTCOMES, Span, plain_text
from kcoord.units import several

_LONGEST_PROBLEM = 1200
_MOST_PROBLEMS = 10
_MOST_ROWS = 100  # of a table
_FEW = 6  # names that are shown unfolded
_LONGEST_VALUE = 300  # characters of a factor
_MOST_DRAWN = 1_500_000  # spans; beyond, the shortest are left out
_MOST_LANES = 8
_MOST_NOTES = 20_000


def page(timeline: Timeline, found: Findings, divergences: Sequence[Divergence] = (), many: Sequence[str] = ()) -> str:
    """The report of a job as an HTML page. `many`: lines about kernels with many keys."""
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
        "figures": "".join(f"<div><dt>{escape(t)}</dt><dd>{escape(v)}</dd></div>" for t, v in _figures(timeline)),
        "notes": "".join(f"<li>{escape(note)}</li>" for note in _notes(timeline, left_out)),
        "canvas_label": escape(label, quote=True),
        "sections": _sections(found, divergences, many),
        "footer": escape(f"Written by kcoord {kcoord.__version__} on {_date(time.time())}."),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = resources.joinpath("report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


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


def _figures(timeline: Timeline) -> list[tuple[str, str]]:
    sums = timeline.figures
    loads = sum(sums[name] for name in ("memory_hits", "local_hits", "store_hits", "waits"))
    return [
        ("nodes", f"{len(timeline.nodes):,}"),
        ("ranks", f"{timeline.ranks:,}"),
        ("from the first request to the last", seconds(timeline.end - timeline.begin)),
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
        ("spent waiting, all ranks together", seconds(sums["wait_seconds"])),
    ]


def _notes(timeline: Timeline, left_out: int) -> list[str]:
    notes = [f"Not read: {plain_text(problem, _LONGEST_PROBLEM)}." for problem in timeline.problems[:_MOST_PROBLEMS]]
    if len(timeline.problems) > _MOST_PROBLEMS:
        notes.append(f"{len(timeline.problems) - _MOST_PROBLEMS} more files were not read.")
    if timeline.dropped:
        notes.append(f"{several(timeline.dropped, 'span')} missing: there were more than are kept.")
    notes += [f"{plain_text(line)}." for line in asides(timeline.figures)]
    if left_out:
        notes.append(f"{left_out:,} spans, the shortest, are not drawn; the sums and tables have them.")
    return notes


def _sections(found: Findings, divergences: Sequence[Divergence], many: Sequence[str]) -> str:
    keys = {id(kernel): n for n, kernel in enumerate(found.kernels)}  # as the time line numbers them
    return "".join((
        _section("Ranks whose keys differ", "".join(_divergence(each, keys) for each in divergences[:_MOST_ROWS])),
        _section("A key for each value", "".join(f"<p>{escape(line)}</p>" for line in many[:_MOST_ROWS])),
        _section("Slowest kernels", _slowest(found, keys)),
        _section("Compiled more than once", _duplicates(found, keys)),
        _section("Failed or lost", _failures(found, keys)),
    ))  # fmt: skip


def _section(title: str, html: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{html}</section>" if html else ""


def _rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of the first `rows`, with the number of others."""
    left = len(rows) - _MOST_ROWS
    more = f'<p class="quiet">and {left:,} more</p>' if left > 0 else ""
    return _table(heads, rows[:_MOST_ROWS]) + more if rows else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`rows` are HTML; a head that begins with # is a column of numbers."""
    kinds = [' class="n"' if head.startswith("#") else "" for head in heads]
    top = "".join(f'<th scope="col"{k}>{escape(h.lstrip("#"))}</th>' for h, k in zip(heads, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{c}</td>" for c, k in zip(row, kinds, strict=True)) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def seconds(amount: float) -> str:
    """About three digits."""
    if amount < 0.0995:
        return f"{amount * 1e3:.0f} ms" if amount >= 0.0095 or amount == 0 else f"{amount * 1e3:.1f} ms"
    if amount < 120:
        return f"{amount:.2f} s" if amount < 9.995 else f"{amount:.1f} s"
    if amount < 7200:
        return f"{int(amount) // 60} min {int(amount) % 60} s"
    return f"{amount / 3600:,.1f} h"


def _slowest(found: Findings, keys: dict[int, int]) -> str:
    heads = (
        "kernel", "backend", "#compile time", "compiled by", "#ranks waited", "#longest wait", "#loads", "#saved", "key",
    )  # fmt: skip
    rows = [
        (
            _button(kernel, keys), escape(kernel.backend), seconds(kernel.seconds), escape(places(kernel.compiles)),
            f"{len(kernel.waiters):,}", seconds(kernel.longest_wait), f"{kernel.loads:,}", seconds(kernel.saved),
            _digest(kernel),
        )
        for kernel in found.compiled
    ]  # fmt: skip
    return _rows(heads, rows)


def _divergence(divergence: Divergence, keys: dict[int, int]) -> str:
    kernels, factors = several(len(divergence.kernels), "kernel"), ", ".join(map(_code, divergence.factors))
    rows = [
        (escape(group.ranks_text), escape(group.nodes_text), ", ".join(map(_code, values)))
        for values, group in divergence.groups.items()
    ]
    head = f"<h3>{kernels}, {seconds(divergence.seconds)} more of compiling: {factors}</h3>"
    remedy = f"<p>Remedy: {escape(divergence.remedy)}.</p>"
    return head + _rows(("ranks", "nodes", "values"), rows) + remedy + _names([*divergence.kernels.values()], keys)


def _duplicates(found: Findings, keys: dict[int, int]) -> str:
    rows = [
        (
            _button(k, keys), f"{len(k.compiles)}", seconds(k.more_than_once), escape(places(k.compiles)),
            "<br>".join(escape(reason) for reason in why_again(k)),
        )
        for k in found.duplicates
    ]  # fmt: skip
    return _rows(("kernel", "#times", "#seconds more", "compiled by", "why"), rows)


def _failures(found: Findings, keys: dict[int, int]) -> str:
    rows = []
    for kernel in found.failures:
        for event, placed in (
            ("the compiler raised an exception", kernel.failures),
            ("the process ended while it compiled", kernel.lost),
        ):
            if placed:
                total = sum(span.seconds for _, span in placed)
                rows.append((_button(kernel, keys), event, f"{len(placed)}", seconds(total), escape(places(placed))))
    return _rows(("kernel", "event", "#times", "#seconds", "where"), rows)


def _code(text: str) -> str:
    return f"<code>{escape(plain_text(text, _LONGEST_VALUE))}</code>"


def _names(kernels: Sequence[Kernel], keys: dict[int, int]) -> str:
    names = ", ".join(f"{_button(k, keys)} {_digest(k)}" for k in kernels[:_MOST_ROWS])
    many = len(kernels) > _FEW
    return f"<details><summary>their names</summary><p>{names}</p></details>" if many else f"<p>{names}</p>"


def _button(kernel: Kernel, keys: dict[int, int]) -> str:
    """The kernel's name; a click shows it alone on the time line."""
    title = "Show this kernel alone in the time line"
    return f'<button class="kernel name" data-key="{keys[id(kernel)]}" title="{title}">{escape(kernel.name)}</button>'


def _digest(kernel: Kernel) -> str:
    variant = f" {escape(kernel.variant)}" if kernel.variant else ""
    return f'<code class="key">{escape(kernel.key[:12])}</code>{variant}'


def drawing(timeline: Timeline, found: Findings, most: int = _MOST_DRAWN) -> tuple[dict[str, Any], int]:
    """The data of the page's script: at most `most` spans as little-endian arrays, their rows, nodes and keys; and the number of
    spans that were left out.
    """
    origin, wall = timeline.begin, timeline.end - timeline.begin
    number = {f"{k.key}:{k.backend}:{k.name}": n for n, k in enumerate(found.kernels)}
    shortest, left_out = _shortest_drawn(timeline, most), 0
    # begins are doubles: a clock that is years off must not make the other rows coarse
    offset, begin, length, packed = array("I", [0]), array("d"), array("f"), array("I")
    notes: dict[int, str] = {}
    rows = []
    for row in timeline.rows:
        drawn = [s for s in row.spans if s.seconds >= shortest or s.kind == "compile"]
        left_out += len(row.spans) - len(drawn)
        lane_of, several = _lanes(drawn)
        for n, span in enumerate(drawn):
            key, lane = number[f"{span.key}:{span.backend}:{span.name}"], lane_of.get(n, 0)
            if span.note and len(notes) < _MOST_NOTES:
                notes[len(begin)] = span.note
            begin.append(span.begin - origin)
            length.append(span.seconds)
            packed.append(key << 8 | lane << 5 | OUTCOMES.index(span.outcome) << 2 | KINDS.index(span.kind))
        offset.append(len(begin))
        title = f"{row.process.node}, {timeline.title(row.process)}, pid {row.process.pid}"
        rows.append({"label": timeline.title(row.process), "title": title, "lanes": several})
    data = {
        "seconds": wall, "rows": rows, "nodes": _nodes(timeline.rows), "outcomes": OUTCOMES, "notes": notes,
        "keys": [{"name": k.name, "backend": k.backend, "key": k.key, "by": places(k.compiles)} for k in found.kernels],
        "offset": _base64(offset), "begin": _base64(begin), "length": _base64(length), "what": _base64(packed),
    }  # fmt: skip
    return data, left_out


def _shortest_drawn(timeline: Timeline, most: int) -> float:
    """The seconds of the shortest span that is drawn, but for compiles, which all are."""
    lengths = [span.seconds for _, span in timeline.spans() if span.kind != "compile"]
    too_many = sum(len(row.spans) for row in timeline.rows) - most
    return sorted(lengths)[min(too_many, len(lengths) - 1)] if too_many > 0 and lengths else 0.0


def _lanes(spans: list[Span]) -> tuple[dict[int, int], int]:
    """The lane of each span that is not in the first one, by the span's number; and the number of lanes."""
    found = lanes(spans)
    if len(found) == 1:
        return {}, 1
    of = {id(span): min(n, _MOST_LANES - 1) for n, lane in enumerate(found) for span in lane}
    return {n: of[id(span)] for n, span in enumerate(spans)}, min(len(found), _MOST_LANES)


def _nodes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for n, row in enumerate(rows):
        if not found or found[-1]["name"] != row.process.node:
            found.append({"name": row.process.node, "first": n, "rows": 0})
        found[-1]["rows"] += 1
    return found


def _base64(numbers: array[Any]) -> str:
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
