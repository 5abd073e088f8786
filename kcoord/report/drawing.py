"""The data that a report's script draws: spans as arrays, and the rows, nodes and keys that they belong to."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from kcoord.report.findings import Findings, places
from kcoord.report.timeline import Row, Timeline
from kcoord.report.trace import lanes
from kcoord.telemetry.spans import KINDS, OUTCOMES, Span

_MOST_DRAWN = 1_500_000  # spans; beyond, the shortest are left out: loads, then fetches, then waits, then compiles
_MOST_LANES = 8
_MOST_NOTES = 20_000
_MOST_EPISODES = 100


def drawing(timeline: Timeline, found: Findings) -> tuple[dict[str, Any], int]:
    """The script's data, and the number of spans that were left out of it. Arrays are little-endian."""
    origin, wall = timeline.begin, timeline.end - timeline.begin
    number = {f"{k.key}:{k.backend}:{k.name}": n for n, k in enumerate(found.kernels)}
    shortest, left_out = _shortest_drawn(timeline), 0
    # begins are doubles: a clock that is years off must not make the other rows coarse
    offset, begin, length, packed = array("I", [0]), array("d"), array("f"), array("I")
    notes: dict[int, str] = {}
    rows = []
    for row in timeline.rows:
        drawn = [s for s in row.spans if s.seconds >= shortest[s.kind]] if shortest else row.spans
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
    episodes = [[b - origin, e - origin] for b, e in found.episodes]
    begins = sorted(span.begin for _, span in timeline.spans())
    counts = [bisect_right(begins, e) - bisect_left(begins, b) for b, e in found.episodes[:_MOST_EPISODES]] or [0]
    data = {
        "seconds": wall, "rows": rows, "nodes": _nodes(timeline.rows), "outcomes": OUTCOMES, "notes": notes,
        "keys": [{"name": k.name, "backend": k.backend, "key": k.key, "by": places(k.compiles)} for k in found.kernels],
        "offset": _base64(offset), "begin": _base64(begin), "length": _base64(length), "what": _base64(packed),
        "episodes": episodes[:_MOST_EPISODES], "busiest": counts.index(max(counts)),
    }  # fmt: skip
    return data, left_out


def _shortest_drawn(timeline: Timeline) -> dict[str, float]:
    """By kind, the seconds of the shortest span that is drawn; empty if all spans are."""
    too_many = sum(len(row.spans) for row in timeline.rows) - _MOST_DRAWN
    if too_many <= 0:
        return {}
    lengths: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _, span in timeline.spans():
        lengths[span.kind].append(span.seconds)
    shortest = {}
    for kind in KINDS:
        shortest[kind] = math.inf if 0 < len(lengths[kind]) <= too_many else 0.0
        if 0 < too_many < len(lengths[kind]):
            shortest[kind] = sorted(lengths[kind])[too_many]
        too_many = max(0, too_many - len(lengths[kind]))
    return shortest


def _lanes(spans: list[Span]) -> tuple[dict[int, int], int]:
    """The lane of each span that is not in the first one, by the span's number; and the number of lanes."""
    found = lanes(spans, nested=False)
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
