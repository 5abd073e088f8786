"""In which order a rank goes through a list that all ranks have, so that each compiles its share and all end together.

The list is dealt out by recorded seconds: each task goes to the rank that has least to do so far (Graham's longest processing
time first, at most a third above the best schedule). A rank's own share comes first; between its tasks it asks for those that
the others should have done by then, two behind its own: so what is ready is fetched while others still compile, and not by all
nodes at the very end, and a share whose rank is slow, or not there, is found before that.

Nothing rests on it: ranks whose lists differ share less well, and compile nothing twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kcoord.warmup.tasks import Task

_BEHIND = 2  # tasks; with one less, ranks begin what its owner was about to, with one more, more is left for the end
_GOLDEN = 0.6180339887  # steps of this part of a list spread neighbours, who share a node, evenly over it


def order(tasks: Sequence[Task], rank: int, world: int) -> list[Task]:
    """All of `tasks`, which are longest first, as `rank` of `world` ranks is to try them."""
    shares = _shares(tasks, world)
    others = shares[:rank] + shares[rank + 1 :]
    begin = int(len(others) * (rank * _GOLDEN % 1.0))
    others = others[begin:] + others[:begin]
    found: list[Task] = []
    for n in range(max(map(len, shares)) + _BEHIND):
        found += shares[rank][n : n + 1]
        if n >= _BEHIND:
            found += [share[n - _BEHIND] for share in others if n - _BEHIND < len(share)]
    return found


def _shares(tasks: Sequence[Task], world: int) -> list[list[Task]]:
    """Each rank's. A task whose seconds are not known counts as much as the others do on average."""
    known = [task.seconds for task in tasks if task.seconds > 0]
    usual = sum(known) / len(known) if known else 1.0
    shares: list[list[Task]] = [[] for _ in range(world)]
    loads = [(0.0, rank) for rank in range(world)]
    for task in tasks:
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + (task.seconds or usual), owner))
        shares[owner].append(task)
    return shares
