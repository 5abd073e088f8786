"""Warnings that say something once."""

from __future__ import annotations

import logging

log = logging.getLogger("kcoord")


class Notices:
    """Lines for the user, each told once however often it happens; at most `_MOST` are remembered.

    Thread-safe and fork-safe without a lock: `dict.setdefault` is atomic, and a dict keeps its order.
    """

    _MOST = 200

    def __init__(self) -> None:
        self._told: dict[str, list[str]] = {}  # what it is about → the line, in a list of its own

    def tell(self, line: str, *, about: str | None = None) -> bool:
        """Log `line` unless something `about` the same was told before; True if it was logged."""
        mine = [line]
        if len(self._told) >= self._MOST or self._told.setdefault(about or line, mine) is not mine:
            return False
        log.warning("kcoord: %s", line)
        return True

    def since(self, position: int) -> tuple[list[str], int]:
        """The lines told after `position`, and the position after them."""
        lines = [line for (line,) in list(self._told.values())]
        return lines[position:], len(lines)
