"""Notices: warnings for the user, each logged once."""

from __future__ import annotations

import logging

log = logging.getLogger("kcoord")


class Notices:
    """Lines for the user, each logged once however often it is told; at most `_MOST` lines.

    Thread-safe and fork-safe without a lock: `dict.setdefault` is atomic, and a dict keeps its order.
    """

    _MOST = 200

    def __init__(self) -> None:
        self._told: dict[str, list[str]] = {}  # subject → the line, in a list whose identity shows who came first

    def tell(self, line: str, *, about: str | None = None) -> bool:
        """Log `line` unless a line with the same `about` (default: the line) was told before. True if it was logged."""
        mine = [line]
        if len(self._told) >= self._MOST or self._told.setdefault(about or line, mine) is not mine:
            return False
        log.warning("kcoord: %s", line)
        return True

    def since(self, position: int) -> tuple[list[str], int]:
        """The lines told after `position`, and the position after them."""
        lines = [line for (line,) in list(self._told.values())]
        return lines[position:], len(lines)
