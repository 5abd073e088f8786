"""Kernels whose ranks share no key: groups of ranks that each compiled for themselves, and the factor that differs.

Groups are no fault by themselves: pipeline stages run one kernel with other sizes, and a warm-up deals out configurations. So
differences count only in factors that all ranks of a job should share (`_REMEDIES`), and in the GPU, where they are expected.

Not guaranteed: that a difference is found where artifacts are gone or spans are missing. Code that differs between nodes is not
told from code that differs between stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kcoord.artifacts.manifest import Manifest
from kcoord.report.differences import Differences, by_key_and_name, differences_of, nearest
from kcoord.report.findings import Findings, Kernel
from kcoord.report.timeline import Timeline

_INSTALLED = (
    "compiler", "compilers", "driver", "libc", "machine", "packages", "platform", "python", "toolchain", "tools", "torch",
    "triton", "version", "versions",
)  # fmt: skip
_OWN = "pass it when the kernel is launched, if all ranks are to run the same code"
_REMEDIES = {
    **dict.fromkeys(_INSTALLED, "install the same on all nodes"),
    **dict.fromkeys(("env", "environment"), "set it alike on all nodes"),
    **dict.fromkeys(("globals", "closure"), _OWN),
    "trees": "copy the same files to all nodes",
    "device_id": "if the code is the same for each GPU of a node, say so with scope=kcoord.Scope.TARGET",
}
_GPU = dict.fromkeys(("device_model", "target"), "")
_MOST_GROUPS = 64  # of one kernel; further groups are only counted
_MOST_COMPARED = 16  # keys of a group


@dataclass
class Group:
    """Ranks whose keys have the same `values`, in the order of `Divergence.factors`, and the kernels that they asked for."""

    values: tuple[str, ...]
    ranks: set[int] = field(default_factory=set)
    nodes: list[str] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)


@dataclass
class Divergence:
    """Groups of ranks, the largest first, that differ in `factors` and share no key of some kernels.

    `remedy`: empty if the difference is expected. `left_out`: the number of further groups, which were not compared.
    """

    factors: tuple[str, ...]
    remedy: str
    groups: list[Group]
    left_out: int = 0

    @property
    def kernels(self) -> list[Kernel]:
        """The kernels that there would be if the keys agreed."""
        return self.groups[0].kernels

    @property
    def seconds(self) -> float:
        """The seconds of the compiles that equal keys would have spared."""
        return sum(kernel.seconds for group in self.groups[1:] for kernel in group.kernels)


@dataclass
class _Linked:
    """Ranks that asked for common keys of one kernel, directly or through other ranks."""

    ranks: set[int]
    keys: list[str]


def divergences_of(timeline: Timeline, found: Findings, manifests: Iterable[Manifest]) -> list[Divergence]:
    """Faults first, the costliest of them first. Processes without a rank are left out."""
    asked: dict[tuple[str, str], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    node_of: dict[int, str] = {}
    for row in timeline.rows:
        if row.process.rank is not None:
            node_of[row.process.rank] = row.process.node
            for span in row.spans:
                if not span.aside:
                    asked[span.backend, span.name][span.key].add(row.process.rank)
    by_key, _ = by_key_and_name(manifests)
    kernels: dict[tuple[str, str], dict[str, Kernel]] = defaultdict(dict)
    for kernel in found.kernels:
        kernels[kernel.backend, kernel.name][kernel.key] = kernel
    cases: dict[tuple[str, ...], Divergence] = {}
    for name, ranks_of in asked.items():
        linked = [g for g in _linked(ranks_of) if any(key in by_key for key in g.keys)]
        for other in linked[1 : _MOST_GROUPS + 1]:
            for remedies, differences in _shared(_compared(linked[0], other, by_key)):
                factors = tuple(factor for factor, _, _ in differences)
                remedy = remedies[factors[0].partition(" ")[0]]
                case = cases.setdefault(factors, Divergence(factors, remedy, []))
                case.left_out = max(case.left_out, len(linked) - _MOST_GROUPS - 1)
                for group, values in ((linked[0], [d[1] for d in differences]), (other, [d[2] for d in differences])):
                    _add(case, tuple(values), group.ranks, [kernels[name][key] for key in group.keys])
    for case in cases.values():
        case.groups.sort(key=lambda g: (-len(g.ranks), min(g.ranks)))
        for each in case.groups:
            each.nodes = list(dict.fromkeys(node_of[rank] for rank in sorted(each.ranks)))
    return sorted(cases.values(), key=lambda d: (not d.remedy, -d.seconds, d.factors))


def _linked(ranks_of: Mapping[str, set[int]]) -> list[_Linked]:
    """The groups of one kernel, whose keys are given with their ranks, the largest first."""
    of: dict[int, _Linked] = {}
    for key, ranks in ranks_of.items():
        mine = _Linked(set(ranks), [key])
        for other in {id(of[rank]): of[rank] for rank in ranks if rank in of}.values():
            mine.ranks |= other.ranks
            mine.keys = other.keys + mine.keys
        of.update(dict.fromkeys(mine.ranks, mine))
    groups = {id(group): group for group in of.values()}.values()
    return sorted(groups, key=lambda g: (-len(g.ranks), min(g.ranks)))


def _compared(one: _Linked, other: _Linked, by_key: Mapping[str, Manifest]) -> Differences:
    """The differences of a key of `other` from the most similar one of `one`."""
    mine = next(by_key[key] for key in other.keys if key in by_key)
    theirs = nearest([by_key[key] for key in one.keys if key in by_key][:_MOST_COMPARED], mine)
    return differences_of(theirs, mine) if theirs is not None else ()


def _shared(differences: Differences) -> Iterable[tuple[Mapping[str, str], Differences]]:
    """Differences that all ranks should share, and those of the GPU: further factors, such as options, follow from these."""
    for remedies in (_REMEDIES, _GPU):
        known = tuple(each for each in differences if each[0].partition(" ")[0] in remedies)
        if known:
            yield remedies, known


def _add(case: Divergence, values: tuple[str, ...], ranks: set[int], kernels: list[Kernel]) -> None:
    group = next((g for g in case.groups if g.values == values), None)
    if group is None:
        group = Group(values)
        case.groups.append(group)
    group.ranks |= ranks
    group.kernels = list({id(k): k for k in (*group.kernels, *kernels)}.values())
