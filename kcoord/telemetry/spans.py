"""Spans: the compiles, waits, fetches and loads of a rank, of which a job's time line is made.

======== ============================================================= ====================================================
kind     from … to                                                     outcomes
======== ============================================================= ====================================================
compile  the compiler begins … it ends (without publishing)            ok, alone, private, failed, given up, lost
wait     the rank asks … another rank's artifact is on this node       ok, lead, failed, alone
fetch    the rank asks … the store's artifact is on this node          ok
load     the rank opens the node's artifact … it is known as verified   ok
memory   no time: `Span.count` loaded handles were found                ok
unhooked no time: kcoord left a part of a compiler to this process     alone
======== ============================================================= ====================================================

``alone``: nobody coordinated the compile. ``private``: it was not shared. ``lost``: its process ended while it compiled, as its
agent noted. After a wait that ends in ``lead`` this rank compiles.
"""

from __future__ import annotations

import hashlib
import math
import os
import reprlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

KINDS = ("load", "fetch", "wait", "compile")
"""The kinds that a time line draws."""

WITHOUT_TIME = ("memory", "unhooked")
"""The other kinds. Of ``unhooked`` the compiler's `Compiler.name` is the backend, the part is the name, and the note says why."""

SOURCES = ("", "store", "pack", "wait")
"""Sources of a load: this node, the store, a pack, or another rank's compile that this one waited for."""

OUTCOMES = ("ok", "alone", "private", "failed", "given up", "lost", "lead")
COMPILED = ("ok", "alone", "private")
"""The outcomes of a compile that made an artifact."""

MOST_AT_ONCE = 1000  # spans in a frame or a record; the longest are far below a frame's size together
SHORTEST_WAIT = 0.01  # seconds; an agent that answers `Lead` sooner was asked, not waited for
KEY_DIGITS = 16
_LONGEST_TEXT = 200
_LONGEST_DIRECTORY = 200
_LAST_SECOND = 1e11  # Unix time in the year 5138


@dataclass(frozen=True, slots=True)
class Span:
    """`begin`: Unix seconds by the rank's own clock. `key`: the start of a digest. `saved`: compile seconds that a load spared.
    `aside`: no kernel of the job. `note`: a reason, for people. `source`: one of `SOURCES`, of a load. `inside`: seconds of a
    compile in which its thread made other compiles. `count`: hits in memory, for which there is one span.
    """

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
    source: str = ""
    inside: float = 0.0
    count: int = 1

    @property
    def end(self) -> float:
        return self.begin + self.seconds

    @property
    def compiled(self) -> bool:
        """True if this is a compile that made an artifact."""
        return self.kind == "compile" and self.outcome in COMPILED

    def to_wire(self) -> list[Any]:
        """Its values; texts are cut."""
        values = (getattr(self, name) for name in self.__slots__)
        return [v[:_LONGEST_TEXT] if isinstance(v, str) else v for v in values]

    @classmethod
    def from_wire(cls, wire: Any) -> Span:
        """Raises ValueError unless `wire` is as `to_wire` gives it. Texts are cut, and unprintable characters replaced."""
        if not isinstance(wire, (list, tuple)) or len(wire) != len(cls.__slots__):
            raise ValueError(f"a span is a list of {len(cls.__slots__)} values")
        kind, outcome, backend, name, key, begin, seconds, saved, aside, note, source, inside, count = wire
        known = kind in (*KINDS, *WITHOUT_TIME) and outcome in OUTCOMES and source in SOURCES
        if not known or not isinstance(aside, bool):
            raise ValueError(f"there is no span {reprlib.repr(kind)} with the outcome {reprlib.repr(outcome)}")
        if not isinstance(key, str) or len(key) > KEY_DIGITS or not set(key) <= set("0123456789abcdef"):
            raise ValueError("a span's key is the start of a digest")
        return cls(
            sys.intern(kind), sys.intern(outcome), plain_text(backend), plain_text(name), sys.intern(key),
            _number(begin, _LAST_SECOND), _number(seconds, 1e9), _number(saved, 1e9), aside, plain_text(note), sys.intern(source),
            _number(inside, 1e9), int(_number(count, 1e9)),
        )  # fmt: skip


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


def directory_name(job: str) -> str:
    """The name of a job's directory: never hidden, never ``..``, never too long. ``directory_name(job_of(d)) == d.name``."""
    name = _quoted(job)
    if len(name) > _LONGEST_DIRECTORY or not name:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        begin = job[:_LONGEST_DIRECTORY]
        while len(_quoted(begin)) > _LONGEST_DIRECTORY - 20:  # whole characters: half of one cannot be quoted
            begin = begin[:-1]
        name = f"{_quoted(begin)}-{digest}"
    return name


def job_of(directory: Path) -> str:
    """The job of a directory. A long name is cut, as the directory's is."""
    try:
        return unquote(directory.name, errors="surrogatepass")
    except UnicodeDecodeError:  # a directory that kcoord did not make
        return directory.name


def _quoted(job: str) -> str:
    name = quote(job, safe="", errors="surrogatepass")
    return f"%2E{name[1:]}" if name.startswith(".") else name
