"""What a rank did for each key, and when: the spans that the time line of a job is made of.

======= ============================================================= =====================================================
kind    from … to                                                     outcomes
======= ============================================================= =====================================================
compile the compiler begins … it is done (publishing is not in it)    ok, alone, private, failed, given up, lost
wait    the rank asks … what another rank compiled is on this node    ok, lead, failed, alone
fetch   the rank asks … the store's artifact is on this node          ok
load    the rank opens the node's artifact … every byte is verified   ok
======= ============================================================= =====================================================

A handle that is in memory leaves none. ``alone``: nobody coordinated it. ``private``: not shared with anybody. ``lost``: the
process ended while it compiled; its agent says so. A wait that ends in ``lead`` is one after which this rank compiles.
"""

from __future__ import annotations

import math
import os
import reprlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

from kcoord.keys.cache_key import CacheKey

KINDS = ("load", "fetch", "wait", "compile")
OUTCOMES = ("ok", "alone", "private", "failed", "given up", "lost", "lead")
COMPILED = ("ok", "alone", "private")
"""The outcomes of a compile that made something."""

MOST_AT_ONCE = 1000  # spans in a frame or a record; the longest are far below a frame's size together
SHORTEST_WAIT = 0.01  # seconds: an agent that says sooner that this rank is to compile was asked, and not waited for
KEY_DIGITS = 16
_LONGEST_TEXT = 200
_MOST_KEPT = 4096
_MANY = 1024
_LAST_SECOND = 1e11  # Unix time in the year 5138


@dataclass(frozen=True, slots=True)
class Span:
    """`begin` is in Unix seconds by the rank's own clock; `key` is the start of a digest; `saved` are the compile seconds that a
    load spared; `aside` marks what is no kernel of the job; `note` says why, to people."""

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
        """Whether this compile made something."""
        return self.kind == "compile" and self.outcome in COMPILED

    def to_wire(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_wire(cls, wire: Any) -> Span:
        """Raises ValueError if `wire` is not what `to_wire` gives. Long texts are cut, and what does not print is replaced."""
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
    """The spans of one process until they are delivered. Thread-safe; after a fork the child needs its own.

    At most `_MOST_KEPT` are kept; those after them are counted as dropped. Recording one costs about a microsecond.
    """

    def __init__(self) -> None:
        # protects the two below; a signal's handler may add one while its thread is in here
        self._lock = threading.RLock()
        self._kept: list[tuple[Any, ...]] = []
        self._dropped = 0
        self._epoch = time.time() - time.perf_counter()  # one for all: a stepped clock does not bend a row

    def add(
        self, kind: str, outcome: str, key: CacheKey, started: float, seconds: float,
        saved: float = 0.0, aside: bool = False, note: str = "",
    ) -> bool:  # fmt: skip
        """Record one that began at `started` by `time.perf_counter`. True: many have gathered, deliver them."""
        begin = self._epoch + started
        span = (kind, outcome, key.backend, key.name, key.digest[:KEY_DIGITS], begin, seconds, saved, aside, note)
        with self._lock:
            if len(self._kept) >= _MOST_KEPT:
                self._dropped += 1
                return self._dropped % _MANY == 0
            self._kept.append(span)
            return len(self._kept) % _MANY == 0

    def undelivered(self, most: int = _MOST_KEPT) -> tuple[list[list[Any]], int]:
        """The oldest, at most `most`, as `Span.to_wire` gives them; and the number of those that were dropped."""
        with self._lock:
            oldest, dropped = self._kept[:most], self._dropped
        return [_short(span) for span in oldest], dropped

    def batches(self) -> Iterator[tuple[list[list[Any]], int]]:
        """`undelivered`, `MOST_AT_ONCE` by `MOST_AT_ONCE`; at least one batch. Mark each as `delivered` before the next."""
        for _ in range(_MOST_KEPT // MOST_AT_ONCE + 1):
            yield self.undelivered(MOST_AT_ONCE)
            if not self:
                return

    def delivered(self, count: int, dropped: int) -> None:
        """The `count` oldest have arrived, and so has the news that `dropped` were dropped."""
        with self._lock:
            del self._kept[:count]
            self._dropped -= dropped

    def __len__(self) -> int:
        return len(self._kept) + bool(self._dropped)


@dataclass(frozen=True)
class Process:
    """Whose spans they are: a process of `node`, `rank` if it has one."""

    node: str
    pid: int
    rank: int | None

    def label(self) -> str:
        return f"pid {self.pid}" if self.rank is None else f"rank {self.rank}"

    @classmethod
    def here(cls, rank: int | None) -> Process:
        return cls(os.uname().nodename, os.getpid(), rank)


def _short(span: tuple[Any, ...]) -> list[Any]:
    return [v[:_LONGEST_TEXT] if isinstance(v, str) else v for v in span]


def checked(wire: Any, most: int = MOST_AT_ONCE) -> tuple[list[Span], int]:
    """The spans of a list that a stranger sent, and the number of those left out: more than `most`, or no spans."""
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
    """A stranger's text, at most `most` characters, all of which print. Raises ValueError if it is no text."""
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} is no text")
    text = value if len(value) <= most else value[: most - 1] + "…"
    if not text.isprintable():
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return sys.intern(text)  # a job's files name the same kernel a thousand times


def _number(value: Any, most: float) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (math.isfinite(value) and 0 <= value <= most)
    ):
        raise ValueError(f"{reprlib.repr(value)} is no time")
    return float(value)
