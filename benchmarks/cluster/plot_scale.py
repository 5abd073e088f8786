"""``python -m benchmarks.cluster.plot_scale [RESULT.md …]``: draw saved results of `cluster_nfs` as docs/scale.svg.

Of a row that several files have, the last one's counts.

Four drawings over the number of nodes, all axes logarithmic: seconds, requests to the store, latency, and Redis' CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.cluster.plot import Point, share, span, steps
from benchmarks.cluster.scale import COLD, COLUMNS, IN_STEP, PACKED, WARM
from benchmarks.nfs_model import LEAST
from benchmarks.result import RESULTS

DRAWING = Path(__file__).resolve().parents[2] / "docs" / "scale.svg"
DRAWN = [RESULTS / f"cluster_nfs{each}.md" for each in ("", "-early-packs", "-objects", "-warm")]
_KEYS, _IN_STEP_KEYS = "300", "30"
_WIDTH, _HEIGHT = 400, 300  # of one drawing
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 385, 62, 258
_COLOURS = {  # that differ for the colour-blind
    COLD: "#0072b2", IN_STEP: "#cc79a7", WARM: "#d55e00", PACKED: "#009e73", "": "#555555",
}  # fmt: skip
_DASHES = {"median": "", "99 %": "6 3", "bound": "2 4"}
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Line:
    """`way` chooses the colour, `kind` the dashes."""

    label: str
    way: str
    kind: str
    points: list[Point]


def read(text: str) -> Rows:
    """The rows of a saved result, by column. Raises ValueError for another file."""
    table = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    if not table or table[0] != COLUMNS:
        raise ValueError("it holds no table of `python -m benchmarks cluster_nfs --save`")
    return [dict(zip(COLUMNS, row, strict=True)) for row in table[2:]]


def drawings(rows: Rows) -> list[tuple[str, str, list[Line]]]:
    """Title, unit and lines of each."""

    def line(label: str, way: str, kind: str, column: str) -> Line:
        mine = [row for row in rows if row["way"] == way and row["keys"] in (_KEYS, _IN_STEP_KEYS) and row[column]]
        return Line(label, way, kind, sorted((_number(row["nodes"]), _number(row[column])) for row in mine))

    def level(label: str, value: float) -> Line:
        nodes = sorted({_number(row["nodes"]) for row in rows})
        return Line(label, "", "bound", [(count, value) for count in nodes])

    requests = "requests per key and node"
    return [
        (
            f"Until every rank has {_KEYS} kernels", "s",
            [line("cold, with a profile", COLD, "median", "wall s"),
             line("its requests ÷ 60,000/s", COLD, "bound", "bound: store s"),
             line("warm, no pack", WARM, "median", "wall s"), line("warm, pack", PACKED, "median", "wall s")],
        ),
        (
            "Requests to the store, per key and node", "",
            [line("cold", COLD, "median", requests), line("warm, no pack", WARM, "median", requests),
             line("warm, pack", PACKED, "median", requests), level("one file each", LEAST)],
        ),
        (
            "From a publish until a rank that waits has it", "ms",
            [line("in step, median", IN_STEP, "median", "publish → loaded, median ms"),
             line("in step, 99 %", IN_STEP, "99 %", "loaded, 99 % ms"),
             level("goal for 99 %", 250)],
        ),
        (
            "CPU of the one Redis", "s",
            [line("cold", COLD, "median", "Redis CPU s"), line("warm, no pack", WARM, "median", "Redis CPU s"),
             level("goal", 3)],
        ),
    ]  # fmt: skip


def draw(rows: Rows) -> str:
    """An SVG document."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _WIDTH} {2 * _HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        "<title>A cluster of up to 1,250 nodes on a modelled NFS server</title>",
        f'<rect width="{2 * _WIDTH}" height="{2 * _HEIGHT}" fill="#fff"/>',
    ]
    for number, (title, unit, lines) in enumerate(drawings(rows)):
        parts.append(f'<g transform="translate({_WIDTH * (number % 2)} {_HEIGHT * (number // 2)})">')
        parts += _drawing(title, unit, [line for line in lines if line.points])
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _drawing(title: str, unit: str, lines: list[Line]) -> list[str]:
    points = [(nodes, max(value, 0.01)) for line in lines for nodes, value in line.points]
    across, up = span([nodes for nodes, _ in points], 2), span([value for _, value in points], 10)

    def x(nodes: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * share(nodes, across)

    def y(value: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * share(max(value, up[0]), up)

    parts = [f'<text x="{_LEFT}" y="18" font-size="14">{escape(title)}</text>', *_axes(points, up, unit, x, y)]
    for number, line in enumerate(lines):
        stroke = f'stroke="{_COLOURS[line.way]}" stroke-width="2" stroke-dasharray="{_DASHES[line.kind]}"'
        path = "M" + "L".join(f"{x(nodes):.1f} {y(value):.1f}" for nodes, value in line.points)
        parts.append(f'<path d="{path}" fill="none" {stroke}/>')
        if line.kind != "bound":
            parts += [
                f'<circle cx="{x(nodes):.1f}" cy="{y(value):.1f}" r="3" fill="{_COLOURS[line.way]}"/>'
                for nodes, value in line.points
            ]
        left, top = _LEFT + 165 * (number % 2), 33 + 15 * (number // 2)
        parts += [
            f'<path d="M{left} {top}h24" {stroke}/>',
            f'<text x="{left + 30}" y="{top + 4}">{escape(line.label)}</text>',
        ]
    return parts


def _axes(
    points: list[Point], up: tuple[float, float], unit: str, x: Callable[[float], float], y: Callable[[float], float]
) -> list[str]:
    parts = []
    for value in (each for each in steps(up) if f"{each:e}".startswith("1")):
        parts.append(f'<path d="M{_LEFT} {y(value):.1f}H{_RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,g} {unit}</text>')
    for nodes in sorted({nodes for nodes, _ in points}):
        parts.append(f'<path d="M{x(nodes):.1f} {_TOP}V{_BOTTOM}" stroke="#eee"/>')
        parts.append(f'<text x="{x(nodes):.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{nodes:,g}</text>')
    parts.append(f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 32}" text-anchor="middle">nodes</text>')
    return parts


def _number(cell: str) -> float:
    return float(cell.replace(",", ""))


def rows_of(*paths: Path) -> Rows:
    """Raises ValueError, and OSError."""
    found = {}
    for path in paths:
        try:
            found |= {(row["nodes"], row["keys"], row["way"]): row for row in read(path.read_text())}
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return list(found.values())


def main(*arguments: str) -> int:
    try:
        DRAWING.write_text(draw(rows_of(*map(Path, arguments or DRAWN))))
    except (OSError, ValueError) as error:
        print(f"benchmarks.cluster.plot_scale: {error}", file=sys.stderr)
        return 1
    print(DRAWING)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
