"""``python -m benchmarks.cluster.plot [RESULT.md]``: draw a saved result of the simulated cluster as docs/cluster.svg.

Both axes are logarithmic. The SVG is plain: Python alone draws it, and a browser shows it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from benchmarks.cluster.table import IN_STEP, PROFILE, STOCK
from benchmarks.result import RESULTS

DRAWING = Path(__file__).resolve().parents[2] / "docs" / "cluster.svg"
Point = tuple[float, float]

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 700, 40, 344
_STYLES = {  # colours that differ for the colour-blind, and shapes that differ without any
    STOCK: ("#555555", "stock: each rank compiles all (computed)", "7 4"),
    IN_STEP: ("#d55e00", "kcoord, no profile, in step", ""),
    PROFILE: ("#0072b2", "kcoord with its profile", ""),
    "bound": ("#009e73", "bound: work ÷ ranks, or longest kernel", "2 4"),
}


def read(text: str) -> tuple[str, dict[str, list[Point]]]:
    """The title, and (ranks, wall seconds) of each way, `bound` among them. Raises ValueError for another file."""
    lines = text.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    if not rows or rows[0][:5] != ["nodes", "ranks", "way", "wall s", "bound s"]:
        raise ValueError("it holds no table of the simulated cluster: run `python -m benchmarks cluster --save`")
    ways: dict[str, list[Point]] = {way: [] for way in _STYLES}
    for _, ranks, way, wall, least, *_ in rows[2:]:
        ways[way].append((float(ranks), float(wall)))
        ways["bound"].append((float(ranks), float(least)))
    return lines[0].lstrip("# "), {way: sorted(set(points)) for way, points in ways.items() if points}


def draw(title: str, ways: dict[str, list[Point]]) -> str:
    """An SVG document."""
    points = [point for line in ways.values() for point in line]
    low, high = span([ranks for ranks, _ in points], 2), span([wall for _, wall in points], 10)

    def x(ranks: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * share(ranks, low)

    def y(wall: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * share(wall, high)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT + 24 * 2}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT + 48}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for wall in steps(high):
        parts.append(f'<path d="M{_LEFT} {y(wall):.1f}H{_RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(wall) + 4:.1f}" text-anchor="end">{wall:g} s</text>')
    for ranks in sorted({ranks for ranks, _ in points}):
        parts.append(f'<path d="M{x(ranks):.1f} {_TOP}V{_BOTTOM}" stroke="#eee"/>')
        parts.append(f'<text x="{x(ranks):.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{ranks:g}</text>')
    parts.append(f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 36}" text-anchor="middle">ranks, 8 to a node</text>')
    for number, (way, line) in enumerate(ways.items()):
        colour, label, dashes = _STYLES[way]
        stroke = f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dashes}"' if dashes else "")
        path = "M" + "L".join(f"{x(ranks):.1f} {y(wall):.1f}" for ranks, wall in line)
        parts.append(f'<path d="{path}" fill="none" {stroke}/>')
        if way in (PROFILE, IN_STEP):
            parts += [_mark(way, x(ranks), y(wall), colour) for ranks, wall in line]
        if way == PROFILE:
            parts += [
                f'<text x="{x(ranks):.1f}" y="{y(wall) - 10:.1f}" text-anchor="middle" fill="{colour}">{wall:.1f}</text>'
                for ranks, wall in line
            ]
        left, top = _LEFT + 330 * (number % 2), _HEIGHT + 6 + 24 * (number // 2)
        parts.append(f'<path d="M{left} {top}h28" {stroke}/>')
        if way in (PROFILE, IN_STEP):
            parts.append(_mark(way, left + 14, top, colour))
        parts.append(f'<text x="{left + 36}" y="{top + 4}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _mark(way: str, x: float, y: float, colour: str) -> str:
    if way == PROFILE:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'
    return f'<rect x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}"/>'


def span(values: Sequence[float], base: float) -> tuple[float, float]:
    """Whole powers of `base` around `values`."""
    first, last = math.floor(math.log(min(values), base) + 1e-9), math.ceil(math.log(max(values), base) - 1e-9)
    return base**first, base ** max(last, first + 1)


def share(value: float, span: tuple[float, float]) -> float:
    return math.log(value / span[0]) / math.log(span[1] / span[0])


def steps(span: tuple[float, float]) -> list[float]:
    steps = [factor * 10**power for power in range(-3, 6) for factor in (1, 2, 5)]
    return [step for step in steps if span[0] * 0.999 <= step <= span[1] * 1.001]


def main(*arguments: str) -> int:
    path = Path(arguments[0]) if arguments else RESULTS / "cluster.md"
    try:
        title, ways = read(path.read_text())
    except (OSError, ValueError) as error:
        print(f"benchmarks.cluster.plot: {path}: {error}", file=sys.stderr)
        return 1
    DRAWING.write_text(draw(title, ways))
    print(DRAWING)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
