"""The order in which a rank walks a list that all ranks have, so that each compiles its share and all end together.

The list is dealt out by recorded seconds: each task goes to the rank with the least work so far (Graham's longest processing
time first, at most a third above the best schedule). A rank's own share comes first. Between its tasks the rank asks for tasks
that the others should have compiled by then, two behind its own: so ready artifacts are fetched while others still compile, not
by all nodes at the very end, and the share of a slow or absent rank is found before that.

The order is an optimization: ranks whose lists differ share the work less well, and compile nothing twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol, TypeVar


class Timed(Protocol):
    """A task, or a recipe; `seconds` is the recorded time of its compile, 0 if unknown."""

    @property
    def seconds(self) -> float: ...


T = TypeVar("T", bound=Timed)

_BEHIND = 2  # tasks; with 1, ranks begin tasks that their owner is about to begin; with 3, more is left for the end
_GOLDEN = 0.6180339887  # of a list; steps of this size spread neighbours, who share a node, evenly over it


def order(tasks: Sequence[T], rank: int, world: int) -> list[T]:
    """All `tasks`, which come longest first, in the order of `rank` of `world` ranks."""
    shares = dealt(tasks, world)
    others = shares[:rank] + shares[rank + 1 :]
    begin = int(len(others) * (rank * _GOLDEN % 1.0))
    others = others[begin:] + others[:begin]
    found: list[T] = []
    for n in range(max(map(len, shares)) + _BEHIND):
        found += shares[rank][n : n + 1]
        if n >= _BEHIND:
            found += [share[n - _BEHIND] for share in others if n - _BEHIND < len(share)]
    return found


def dealt(tasks: Sequence[T], world: int) -> list[list[T]]:
    """The share of each rank of `tasks`, which come longest first. One of unknown seconds counts as the average of the others."""
    known = [task.seconds for task in tasks if task.seconds > 0]
    usual = sum(known) / len(known) if known else 1.0
    shares: list[list[T]] = [[] for _ in range(world)]
    loads = [(0.0, rank) for rank in range(world)]
    for task in tasks:
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + (task.seconds or usual), owner))
        shares[owner].append(task)
    return shares
