"""Warnings that say something once."""

from __future__ import annotations

import logging
import threading

log = logging.getLogger("kcoord")


class Notices:
    """Lines for the user, each told once however often it happens. Thread-safe; at most `_MOST` are remembered."""

    _MOST = 200

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._seen: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, line: str, *, about: str | None = None) -> bool:
        """Log `line` unless something `about` the same was told before; True if it was logged."""
        with self._lock:
            if (about or line) in self._seen or len(self._seen) >= self._MOST:
                return False
            self._seen.add(about or line)
            self._lines.append(line)
        log.warning("kcoord: %s", line)
        return True

    def since(self, position: int) -> tuple[list[str], int]:
        """The lines told after `position`, and the position after them."""
        with self._lock:
            return self._lines[position:], len(self._lines)
