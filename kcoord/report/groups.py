"""Groups of ranks that asked for the same kernel and share no key of it.

Ranks that asked for one key of a kernel are in one group, and so are ranks that other ranks link.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from kcoord.report.timeline import Timeline

Name = tuple[str, str]
"""A kernel's backend and name."""


@dataclass
class Ranks:
    """A group: its ranks, and the numbers in `Asked.keys` of the keys of one kernel that they asked for."""

    ranks: set[int]
    keys: list[int]


@dataclass
class Asked:
    """The keys that each rank of a job asked for. Ranks that asked for the same keys are of one *kind*."""

    keys: list[tuple[str, str, str]]
    """Backend, name and key."""
    kinds: list[tuple[tuple[int, ...], list[int]]]
    """Numbers of keys, and the ranks that asked for exactly these."""
    nodes: dict[int, dict[str, None]]
    """The nodes of each rank, in the order of its processes."""

    @cached_property
    def local(self) -> dict[int, int]:
        """Each rank's number on its node, counted from the node's lowest rank."""
        lowest: dict[str, int] = {}
        for rank, nodes in self.nodes.items():
            for node in nodes:
                lowest[node] = min(rank, lowest.get(node, rank))
        return {rank: rank - lowest[next(iter(nodes))] for rank, nodes in self.nodes.items()}

    @cached_property
    def _names(self) -> list[frozenset[Name]]:
        """The kernels that each kind of ranks asked for."""
        return [frozenset(self.keys[number][:2] for number in numbers) for numbers, _ in self.kinds]

    def names(self, ranks: set[int]) -> set[Name]:
        """The kernels that any of `ranks` asked for."""
        kinds = zip(self._names, self.kinds, strict=True)
        return set().union(*{names for names, (_, who) in kinds if not ranks.isdisjoint(who)})

    def share(self, groups: Iterable[set[int]]) -> bool:
        """True if ranks of two of the groups asked for one key."""
        group_of = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
        first: dict[int, int] = {}
        for numbers, who in self.kinds:
            group = group_of.get(who[0])  # a kind is of one group
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
    """Each kernel with several groups, the largest first. Takes time in proportion to the keys that were asked for."""
    numbers_of: dict[Name, int] = {}
    name_of = [numbers_of.setdefault((backend, name), len(numbers_of)) for backend, name, _ in asked.keys]
    parent = list(range(len(asked.keys)))

    def root(number: int) -> int:
        while (above := parent[number]) != number:
            parent[number] = number = parent[above]
        return number

    for numbers, _ in asked.kinds:
        first: dict[int, int] = {}  # of each kernel, the first key that these ranks asked for
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
