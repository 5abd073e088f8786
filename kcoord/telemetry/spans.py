"""Spans: the compiles, waits, fetches and loads of a rank, of which a job's time line is made.

======= ============================================================= =====================================================
kind    from … to                                                     outcomes
======= ============================================================= =====================================================
compile the compiler begins … it ends (without publishing)            ok, alone, private, failed, given up, lost
wait    the rank asks … another rank's artifact is on this node       ok, lead, failed, alone
fetch   the rank asks … the store's artifact is on this node          ok
load    the rank opens the node's artifact … it is known as verified   ok
======= ============================================================= =====================================================

A hit in memory leaves no span. ``alone``: nobody coordinated the compile. ``private``: it was not shared. ``lost``: its process
ended while it compiled, as its agent noted. After a wait that ends in ``lead`` this rank compiles.
"""

from __future__ import annotations

import math
import os
import reprlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kcoord.keys.cache_key import CacheKey

KINDS = ("load", "fetch", "wait", "compile")
OUTCOMES = ("ok", "alone", "private", "failed", "given up", "lost", "lead")
COMPILED = ("ok", "alone", "private")
"""The outcomes of a compile that made an artifact."""

MOST_AT_ONCE = 1000  # spans in a frame or a record; the longest are far below a frame's size together
SHORTEST_WAIT = 0.01  # seconds; an agent that answers `Lead` sooner was asked, not waited for
KEY_DIGITS = 16
_LONGEST_TEXT = 200
_MOST_KEPT = 4096
_MANY = 1024
_LAST_SECOND = 1e11  # Unix time in the year 5138


@dataclass(frozen=True, slots=True)
class Span:
    """`begin`: Unix seconds by the rank's own clock. `key`: the start of a digest. `saved`: compile seconds that a load spared.
    `aside`: no kernel of the job. `note`: a reason, for people."""

    kind: str
    outcome: str
    backend: str
    name: str
    key: str
    begin: float
    seconds: float
    saved: float = 0.0
    aside: bool = False
    note: str = ""

    @property
    def end(self) -> float:
        return self.begin + self.seconds

    @property
    def compiled(self) -> bool:
        """True if this is a compile that made an artifact."""
        return self.kind == "compile" and self.outcome in COMPILED

    def to_wire(self) -> list[Any]:
        return [getattr(self, name) for name in self.__slots__]

    @classmethod
    def from_wire(cls, wire: Any) -> Span:
        """Raises ValueError unless `wire` is as `to_wire` gives it. Texts are cut, and unprintable characters replaced."""
        if not isinstance(wire, (list, tuple)) or len(wire) < 10:  # a later version may add to it
            raise ValueError("a span is a list of ten values")
        kind, outcome, backend, name, key, begin, seconds, saved, aside, note = wire[:10]
        if kind not in KINDS or outcome not in OUTCOMES or not isinstance(aside, bool):
            raise ValueError(f"there is no span {reprlib.repr(kind)} with the outcome {reprlib.repr(outcome)}")
        if not isinstance(key, str) or len(key) > KEY_DIGITS or not set(key) <= set("0123456789abcdef"):
            raise ValueError("a span's key is the start of a digest")
        return cls(
            sys.intern(kind), sys.intern(outcome), plain_text(backend), plain_text(name), sys.intern(key),
            _number(begin, _LAST_SECOND), _number(seconds, 1e9), _number(saved, 1e9), aside, plain_text(note),
        )  # fmt: skip


class Spans:
    """The undelivered spans of one process. Thread-safe; after a fork the child needs its own.

    Keeps at most `_MOST_KEPT` and counts further ones as dropped. Recording a span costs about a microsecond.
    """

    def __init__(self) -> None:
        # protects the two below; reentrant, since a signal handler may add a span while its thread holds it
        self._lock = threading.RLock()
        self._kept: list[tuple[Any, ...]] = []
        self._dropped = 0
        self._epoch = time.time() - time.perf_counter()  # read once: a clock that steps does not distort a row

    def add(
        self, kind: str, outcome: str, key: CacheKey, started: float, seconds: float,
        saved: float = 0.0, aside: bool = False, note: str = "",
    ) -> bool:  # fmt: skip
        """Record a span that began at `started` by `time.perf_counter`. True: many have gathered, deliver them."""
        begin = self._epoch + started
        span = (kind, outcome, key.backend, key.name, key.digest[:KEY_DIGITS], begin, seconds, saved, aside, note)
        with self._lock:
            if len(self._kept) >= _MOST_KEPT:
                self._dropped += 1
                return self._dropped % _MANY == 0
            self._kept.append(span)
            return len(self._kept) % _MANY == 0

    def undelivered(self, most: int = _MOST_KEPT) -> tuple[list[list[Any]], int]:
        """The oldest spans, at most `most`, as `Span.to_wire` gives them, and the number of dropped ones."""
        with self._lock:
            oldest, dropped = self._kept[:most], self._dropped
        return [_short(span) for span in oldest], dropped

    def batches(self) -> Iterator[tuple[list[list[Any]], int]]:
        """`undelivered` in batches of `MOST_AT_ONCE`, at least one. Mark each as `delivered` before the next."""
        for _ in range(_MOST_KEPT // MOST_AT_ONCE + 1):
            yield self.undelivered(MOST_AT_ONCE)
            if not self:
                return

    def delivered(self, count: int, dropped: int) -> None:
        """Forget the `count` oldest spans and `dropped` of the dropped ones: the agent has both."""
        with self._lock:
            del self._kept[:count]
            self._dropped -= dropped

    def __len__(self) -> int:
        return len(self._kept) + bool(self._dropped)


@dataclass(frozen=True)
class Process:
    """A process of `node`, with its rank if it has one; or a worker of its pool."""

    node: str
    pid: int
    rank: int | None
    pool: bool = False

    def label(self) -> str:
        if self.pool:
            return f"pool (pid {self.pid})"
        return f"pid {self.pid}" if self.rank is None else f"rank {self.rank}"

    @classmethod
    def here(cls, rank: int | None) -> Process:
        return cls(os.uname().nodename, os.getpid(), rank)


def _short(span: tuple[Any, ...]) -> list[Any]:
    return [v[:_LONGEST_TEXT] if isinstance(v, str) else v for v in span]


def checked(wire: Any, most: int = MOST_AT_ONCE) -> tuple[list[Span], int]:
    """The spans of an untrusted list, and the number of entries left out: malformed ones, and those beyond `most`."""
    if not isinstance(wire, list):
        return [], 0
    found = []
    for each in wire[:most]:
        try:
            found.append(Span.from_wire(each))
        except ValueError:
            continue
    return found, len(wire) - len(found)


def plain_text(value: Any, most: int = _LONGEST_TEXT) -> str:
    """Untrusted text, cut to `most` characters and made printable. Raises ValueError if it is no text."""
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} is no text")
    text = value if len(value) <= most else value[: most - 1] + "…"
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return sys.intern(text)  # a job's files name one kernel a thousand times


def _number(value: Any, most: float) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (math.isfinite(value) and 0 <= value <= most)
    ):
        raise ValueError(f"{reprlib.repr(value)} is no time")
    return float(value)
