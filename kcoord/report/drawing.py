"""The data that a report's script draws: spans as arrays, and the rows, nodes and keys that they belong to."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from kcoord.report.findings import Findings, places
from kcoord.report.timeline import Row, Timeline
from kcoord.report.trace import lanes
from kcoord.telemetry.spans import KINDS, OUTCOMES, Span

_MOST_DRAWN = 1_500_000  # spans; beyond, the shortest are left out
_MOST_LANES = 8
_MOST_NOTES = 20_000


def drawing(timeline: Timeline, found: Findings, most: int = _MOST_DRAWN) -> tuple[dict[str, Any], int]:
    """The script's data, of `most` spans, and the number of those that were left out. Arrays are little-endian."""
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
