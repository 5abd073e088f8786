"""Draws ``first-step.svg`` from benchmark results: a job from its launch to the end of its first step."""

from __future__ import annotations

from pathlib import Path

_RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
_GROUPS = {
    "flash-linear-attention, one layer: ten kernels, 195 configurations to tune": (
        "linear_attention-H100.md",
        {
            "one shared TRITON_CACHE_DIR, cold": "torchrun, cold",
            "kcoord-torchrun, first run ever": "kcoord-torchrun, first run ever",
            "kcoord-torchrun, cold, run before": "kcoord-torchrun, cold, run before",
            "kcoord-torchrun, warm": "kcoord-torchrun, warm",
        },
    ),
    "Liger-Kernel, 123 kernels": (
        "rivals-H100.md",
        {
            "one shared TRITON_CACHE_DIR, cold": "torchrun, cold",
            "kcoord-torchrun, first run ever": "kcoord-torchrun, first run ever",
            "kcoord-torchrun, cold, run before": "kcoord-torchrun, cold, run before",
            "kcoord-torchrun, a warm store, a new node": "kcoord-torchrun, warm",
        },
    ),
}
_WIDTH, _LEFT, _BAR, _ROW = 860, 250, 500, 24
_START, _COMPILE = "#b8c0cc", "#d9663d"


def drawn() -> str:
    """The picture, as SVG."""
    parts: list[str] = []
    y = 14
    for title, (file, rows) in _GROUPS.items():
        found = _figures(_RESULTS / file)
        longest = max(whole for _, whole in (found[name] for name in rows))
        y += 20
        parts.append(f'<text x="16" y="{y}" font-weight="bold">{title}</text>')
        for name, label in rows.items():
            compiling, whole = found[name]
            y += _ROW
            before, during = (_BAR * seconds / longest for seconds in (whole - compiling, compiling))
            parts.append(f'<text x="{_LEFT - 10}" y="{y + 5}" text-anchor="end">{label}</text>')
            for x, width, colour in ((_LEFT, before, _START), (_LEFT + before, during, _COMPILE)):
                parts.append(f'<rect x="{x:.1f}" y="{y - 8}" width="{width:.1f}" height="16" fill="{colour}"/>')
            parts.append(f'<text x="{_LEFT + before + during + 8:.1f}" y="{y + 5}">{whole:.0f} s</text>')
        y += 18
    y += 16
    for x, colour, text in (
        (_LEFT, _START, "start: imports, process group"),
        (_LEFT + 240, _COMPILE, "kernels: compiled, tuned, loaded"),
    ):
        parts.append(
            f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{colour}"/><text x="{x + 20}" y="{y}">{text}</text>'
        )
    height = y + 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="13" fill="#222">'
        "<title>From the launch to the end of the first step, four ranks on one H100</title>"
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _figures(path: Path) -> dict[str, tuple[float, float]]:
    """By the row's name: seconds of the compile phase, and of the whole job."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in path.read_text().splitlines() if line[:2] == "| "
    ]
    return {cells[0]: (float(cells[1]), float(cells[-1])) for cells in rows[2:]}
