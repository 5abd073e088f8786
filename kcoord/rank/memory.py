"""The memory tier: a rank's loaded handles, per `(digest, DeviceKey)`.

A hit takes no lock: it is one `dict.get` and one counter, both atomic under the interpreter. Only an insertion locks,
and evicts the least recently used entry when the tier is full.
"""

from __future__ import annotations

import itertools
import threading
from typing import Generic, TypeVar

from kcoord.keys.device import DeviceKey

T = TypeVar("T")


class _Entry(Generic[T]):
    __slots__ = ("used", "value")

    def __init__(self, value: T, used: int) -> None:
        self.value, self.used = value, used


class MemoryTier(Generic[T]):
    """At most `capacity` handles. Thread-safe. Not guaranteed: that two threads never load one handle twice."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: dict[tuple[str, DeviceKey], _Entry[T]] = {}
        self._clock = itertools.count()
        # protects insertion and eviction; a signal's handler may come to insert while its thread is in here
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: str, device: DeviceKey) -> T | None:
        entry = self._entries.get((digest, device))
        if entry is None:
            return None
        entry.used = next(self._clock)
        return entry.value

    def put(self, digest: str, device: DeviceKey, value: T) -> T:
        """Keep `value` and return the handle that is kept: the first one, if two threads loaded it at once."""
        with self._lock:
            entry = self._entries.setdefault((digest, device), _Entry(value, next(self._clock)))
            while len(self._entries) > self._capacity:
                oldest, _ = min(list(self._entries.items()), key=lambda each: each[1].used)
                self._entries.pop(oldest, None)
        return entry.value

    def forget_after_fork(self) -> None:
        """In a forked child: another thread of the parent may have held the lock."""
        self._lock = threading.RLock()
