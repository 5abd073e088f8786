"""Groups of a job's ranks that have nothing in common of a kernel, though they all have asked for it.

Ranks that have asked for a key of a kernel in common belong together, and so do those that are linked by others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from kcoord.report.trace import Timeline

Name = tuple[str, str]
"""A kernel's backend and name."""


@dataclass
class Ranks:
    """A group: its ranks, and the keys of one kernel that they have asked for, by their numbers in `Asked.keys`."""

    ranks: set[int]
    keys: list[int]


@dataclass
class Asked:
    """What each rank of a job has asked for. Ranks that asked for the same are of one *kind*."""

    keys: list[tuple[str, str, str]]
    """Backend, name and key."""
    kinds: list[tuple[tuple[int, ...], list[int]]]
    """Numbers of keys, and the ranks that asked for these."""
    nodes: dict[int, dict[str, None]]
    """Where each rank was, in the order of its processes."""

    @cached_property
    def local(self) -> dict[int, int]:
        """Each rank's number on its node, as far as it can be told: from the lowest."""
        lowest: dict[str, int] = {}
        for rank, nodes in self.nodes.items():
            for node in nodes:
                lowest[node] = min(rank, lowest.get(node, rank))
        return {rank: rank - lowest[next(iter(nodes))] for rank, nodes in self.nodes.items()}

    @cached_property
    def _names(self) -> list[frozenset[Name]]:
        """The kernels that each kind of ranks has asked for."""
        return [frozenset(self.keys[number][:2] for number in numbers) for numbers, _ in self.kinds]

    def names(self, ranks: set[int]) -> set[Name]:
        """The kernels that any of `ranks` has asked for."""
        kinds = zip(self._names, self.kinds, strict=True)
        return set().union(*{names for names, (_, who) in kinds if not ranks.isdisjoint(who)})

    def share(self, groups: Iterable[set[int]]) -> bool:
        """Whether any key was asked for by ranks of two of the groups."""
        group_of = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
        first: dict[int, int] = {}
        for numbers, who in self.kinds:
            group = group_of.get(who[0])  # who asked for the same is of one group
            if group is not None and any(first.setdefault(number, group) != group for number in numbers):
                return True
        return False


def asked_of(timeline: Timeline) -> Asked:
    numbers: dict[tuple[str, str, str], int] = {}
    asked: dict[int, set[int]] = defaultdict(set)
    nodes: dict[int, dict[str, None]] = defaultdict(dict)
    for row in timeline.rows:
        rank = row.process.rank
        if rank is None:
            continue
        nodes[rank][row.process.node] = None
        mine = dict.fromkeys((span.backend, span.name, span.key) for span in row.spans if not span.aside)
        asked[rank].update([numbers.setdefault(key, len(numbers)) for key in mine])
    kinds: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, theirs in asked.items():
        kinds[tuple(sorted(theirs))].append(rank)
    return Asked(list(numbers), list(kinds.items()), nodes)


def apart(asked: Asked) -> Iterator[tuple[Name, list[Ranks]]]:
    """Each kernel in which there are several groups, the largest first. Takes time in proportion to what was asked for."""
    numbers_of: dict[Name, int] = {}
    name_of = [numbers_of.setdefault((backend, name), len(numbers_of)) for backend, name, _ in asked.keys]
    parent = list(range(len(asked.keys)))

    def root(number: int) -> int:
        while (above := parent[number]) != number:
            parent[number] = number = parent[above]
        return number

    for numbers, _ in asked.kinds:
        first: dict[int, int] = {}  # of each kernel, the first key that these ranks have asked for
        for number in numbers:
            known = first.setdefault(name_of[number], number)
            if known != number:
                parent[root(number)] = root(known)
    groups: dict[int, dict[int, Ranks]] = defaultdict(dict)
    for number, name in enumerate(name_of):
        groups[name].setdefault(root(number), Ranks(set(), [])).keys.append(number)
    separate = {name for name, by_root in groups.items() if len(by_root) > 1}
    for numbers, who in asked.kinds:
        for name, top in {(name_of[number], root(number)) for number in numbers if name_of[number] in separate}:
            groups[name][top].ranks.update(who)
    for kernel, name in numbers_of.items():
        if name in separate:
            yield kernel, sorted(groups[name].values(), key=lambda group: (-len(group.ranks), min(group.ranks)))
