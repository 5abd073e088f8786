"""Compiles of torch that are under way in a thread, innermost last, and the entries that they make or were given.

A lead's entries are collected while torch writes them to its caches, and published when the compile has returned.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from torch._dynamo.exc import RestartAnalysis

from kcoord.artifacts.local import Artifact
from kcoord.backends.fail_open import fails_open
from kcoord.backends.inductor.adapter import backend
from kcoord.backends.inductor.request import FILE, UNIT, Entries, Entry, write_entries
from kcoord.interruption import let_through
from kcoord.rank.coordinator import Busy, Compilation

_STATIC = "_is_inductor_static"
"""Inductor's mark on inputs of a GPU's graph. It would enter the key of the next compile, on the rank that compiled alone."""


class Passed(BaseException):
    """Ends the compile of a unit or graph that another rank is at. No guard of torch may catch it."""


class _Open(threading.local):
    def __init__(self) -> None:
        self.all: list[OpenCompile] = []
        self.passed: str | None = None  # as `passing_over` says; None outside its blocks


_open = _Open()


def innermost() -> OpenCompile | None:
    return _open.all[-1] if _open.all else None


def gpu() -> int | None:
    """The GPU that the innermost unit or graph is on, if its entries serve other GPUs, too."""
    found = innermost()
    return found.gpu if found is not None else None


@contextlib.contextmanager
def passing_over(kind: str) -> Iterator[None]:
    """A unit, or a graph, of this `kind` raises `Passed` in this block if another rank compiles it now."""
    before, _open.passed = _open.passed, kind
    try:
        yield
    finally:
        _open.passed = before


def in_turn() -> bool:
    """True outside a block of `passing_over`: torch needs each unit before it goes on."""
    return _open.passed is None


def leading(kind: str = "") -> OpenCompile | None:
    """The innermost unit or graph of this thread, or the innermost of that `kind`, if this rank compiles it for others."""
    found = next((each for each in reversed(_open.all) if kind in ("", each.kind)), None)
    return found if found is not None and found.leads else None


def following() -> OpenCompile | None:
    """The innermost compile of this thread, if that is a unit which another rank leads."""
    found = innermost()
    return found if found is not None and found.follows else None


@dataclass(eq=False)
class OpenCompile:
    """One unit or graph, while torch compiles or loads it. A context manager.

    `problem`: why it is not shared. `gpu`: as the function `gpu`. `given`: the entries that a lookup may answer with. `made`:
    what torch has written since. `looked_up`: torch has looked into its cache of this kind. `graph`: torch's. `by_graphs`: a
    unit whose graphs ranks share one by one while it is under way; `follows`: another rank leads it; `backwards`: returns
    torch's compiler of its backward.
    """

    kind: str
    problem: str = ""
    gpu: int | None = None
    given: Entries = field(default_factory=dict)
    asked: Entry | None = None
    compilation: Compilation | None = None
    made: dict[tuple[str, str], bytes] = field(default_factory=dict)
    looked_up: bool = False
    graph: Any = None
    by_graphs: bool = False
    follows: bool = False
    backwards: Callable[[], Callable[..., Any]] | None = None

    @property
    def leads(self) -> bool:
        return self.compilation is not None and not self.compilation.ended

    def ask(self, entry: Entry) -> None:
        """Have the entry: `given` holds it, or this rank leads, or (if it is not shared) neither."""
        self.asked = entry
        found = backend.begin(entry, waits=not self.by_graphs and self.kind != _open.passed)
        if isinstance(found, Compilation):
            self.compilation = found
        elif isinstance(found, Artifact):
            self.given = backend.entries(entry, found)
        elif isinstance(found, Busy):
            if not self.by_graphs:
                raise Passed
            self.follows = True  # it waits for the graphs

    def __enter__(self) -> OpenCompile:
        _open.all.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _open.all.pop()
        self._end(error)

    @fails_open(lambda self, error: None)
    def _end(self, error: BaseException | None) -> None:
        compilation, entry = self.compilation, self.asked
        if compilation is None or entry is None or compilation.ended:
            return
        try:
            self._end_lead(compilation, entry, error)
        finally:
            compilation.give_up()  # if that failed: others wait

    def _end_lead(self, compilation: Compilation, entry: Entry, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, RestartAnalysis):  # torch traces anew, under other assumptions
            compilation.raised(error)
        elif (entry.kind, entry.key) not in self.made:
            compilation.refuse_sharing(f"torch kept no entry of {compilation.key.name}")
        else:
            try:
                write_entries(compilation.staging / FILE, ((*name, content) for name, content in self.made.items()))
            except OSError as failure:
                let_through(failure)
                compilation.shared = False
            backend.finish(entry, compilation)

    def refuse_sharing(self, why: str) -> None:
        """Go on compiling for this process alone. Other ranks no longer wait."""
        if self.compilation is not None and not self.compilation.ended:
            self.compilation.refuse_sharing(why)


def unmark(inputs: Iterable[Any]) -> None:
    """Remove Inductor's mark, if it is there."""
    for each in inputs:
        if hasattr(each, _STATIC):
            delattr(each, _STATIC)


def record(kind: str, key: str, content: Any) -> None:
    """Torch writes an entry to one of its caches."""
    for each in _open.all:
        if each.leads and isinstance(content, bytes) and (each.kind == UNIT or kind == each.kind):
            each.made[kind, key] = content
