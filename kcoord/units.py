"""Sizes, times, counts and lists as people write them: ``50GiB``, ``30d``, ``2 kernels``."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SIZES = {
    "": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "PIB": 1 << 50,
}  # fmt: skip
_SPANS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_AMOUNT = re.compile(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes: ``50GiB``, ``50G`` (the same, as in `df -h`) or ``50GB`` (10⁹). Raises ValueError."""
    amount = _AMOUNT.fullmatch(text)
    unit = _SIZES.get(amount[2].upper()) if amount else None
    if amount is None or unit is None or not 0 <= float(amount[1]) * unit < 1 << 63:
        raise ValueError("it must be a size such as 50GiB, 800MB or 123456 (bytes)")
    return int(float(amount[1]) * unit)


def parse_span(text: str) -> float:
    """Seconds: ``30d``, ``12h``, ``15min``, ``45s``, ``2w``. Raises ValueError, also for a number without a unit."""
    amount = _AMOUNT.fullmatch(text)
    unit = _SPANS.get(amount[2].lower()) if amount else None
    if amount is None or (unit is None and float(amount[1]) != 0) or float(amount[1]) * (unit or 1) > 1e9:
        raise ValueError("it must be a time such as 30d, 12h, 15min or 45s")
    return float(amount[1]) * (unit or 1)


def bytes_text(size: float) -> str:
    """``1.5 GiB``."""
    for unit, number in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= number:
            return f"{size / number:.1f} {unit}"
    return f"{size:.0f} bytes"


def span_text(seconds: float) -> str:
    """``41 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def several(count: int, one: str, many: str = "") -> str:
    """``1 kernel``, ``2,000 kernels``. `many`: by default `one` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def first_few(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """``a, b and 1,998 more``."""
    left = len(texts) - most
    return separator.join(texts[:most]) + (f" and {left:,} more" if left > 0 else "")
