"""Tables in HTML, and figures and lists as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_MOST_RANGES = 8
_MOST_NODES = 3


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
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


def percent(share: float) -> str:
    return f"{share * 100:.0f} %" if share >= 0.0995 or share == 0 else f"{share * 100:.1f} %"


def several(count: int, one: str, many: str = "") -> str:
    """``1 kernel``, ``2,000 kernels``. `many`: by default `one` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def first_few(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """``a, b and 1,998 more``."""
    left = len(texts) - most
    return separator.join(texts[:most]) + (f" and {left:,} more" if left > 0 else "")


def ranges(numbers: Sequence[int]) -> list[str]:
    """Sorted numbers as Slurm writes them: ``["0-7", "9"]``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ["-".join(map(str, each)) for each in found]


def ranks_text(ranks: Sequence[int]) -> str:
    """``ranks 0-7, 9``."""
    found = ranges(ranks)
    more = f" and more, {len(ranks):,} in all" if len(found) > _MOST_RANGES else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(found[:_MOST_RANGES])}{more}"


def nodes_text(nodes: Sequence[str]) -> str:
    return first_few(nodes, _MOST_NODES)
