"""Ranks of one job whose keys diverge: each group compiles kernels that the others have, and nothing fails.

Groups that share no key of a kernel (`kcoord.report.groups`) are compared by their nearest keys, the pair with the fewest
differing factors. Groups are no fault by themselves: pipeline stages run one kernel with other sizes, and a warm-up deals
out variants. The differing factors decide:

- surroundings that all ranks of a job should share (the environment, a tool, a version), or a GPU's number: a fault;
- the GPU: shown as expected;
- factors of the call (arguments, constants, options): a fault only if the value is the rank's own number, and the ranks differ
  so in several kernels, or are many, and share others;
- other factors (code, globals, unknown ones): a fault in that case, too, and if the ranks differ in the same way in *every*
  kernel of the backend. Both require that each key of one group has its counterpart in the other.

Processes without a rank are left out. A rank that was started again stays the same rank.
Not guaranteed: that a difference is found where artifacts are gone, spans are missing, or a call's sizes differ as well.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kcoord.artifacts.manifest import Manifest
from kcoord.keys.cache_key import FactorDiff
from kcoord.keys.variants import flat, is_digest, is_of_the_call
from kcoord.report.findings import Findings, Kernel
from kcoord.report.groups import Asked, Name, Ranks, apart, asked_of
from kcoord.report.relatives import telling_differences, whole_key
from kcoord.report.timeline import Timeline

_SURROUNDINGS = frozenset((
    "compiler", "compilers", "device_id", "driver", "env", "environment", "libc", "machine", "packages", "platform", "python",
    "toolchain", "tools", "torch", "trees", "triton", "version", "versions",
))  # fmt: skip
_GPU = frozenset(("device_model", "target"))
_ALIKE = "set it alike on all nodes"
_INSTALL = "install the same on all nodes"
_REMEDIES = {
    "env": _ALIKE,
    "environment": _ALIKE,
    "trees": "copy the same files to all nodes",
    "device_id": "if the code is the same for each GPU of a node, say so with scope=kcoord.Scope.TARGET",
}
_OWN = "each rank has its own number in the code: pass it when the kernel is launched"
_OTHER = "make it the same on all ranks, if they are to run the same code"
_MOST_GROUPS = 64  # of one kernel; further groups are only counted
_MOST_COMPARED = 64  # keys of one group in one kernel
_NUMBER = re.compile(r"\D*(\d{1,9})\D*")
_EVIDENCE = 2  # kernels, or groups beside the first, that make a pattern no coincidence
_MOST_TRIED = 4  # divergences of the same factors that a kernel's is compared with

_Values = tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Ranks whose keys have the same `values`, in the order of `Divergence.factors`, and the `kernels` that they asked for."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    values: _Values
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class Divergence:
    """Groups of ranks, the largest first, that differ in `factors` and share no key of some kernels.

    `expected`: they have different GPUs, and there is no `remedy`. `varies`: the values are the first kernel's; others have
    their own. `left_out`: the number of further groups, which were not compared.
    """

    factors: tuple[str, ...]
    groups: tuple[Group, ...]
    remedy: str = ""
    varies: bool = False
    left_out: int = 0

    @property
    def expected(self) -> bool:
        return not self.remedy

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels that there would be if the keys agreed."""
        return self.groups[0].kernels

    @property
    def seconds(self) -> float:
        """The seconds of the compiles that equal keys would have spared."""
        return sum(kernel.seconds for group in self.groups[1:] for kernel in group.kernels)


@dataclass
class _Case:
    """A divergence in the making. The others of `groups` were compared with the first; `keys` are each group's.

    `whole`: in each kernel every key of one group has its counterpart in the other.
    """

    kind: str
    factors: tuple[str, ...]
    names: set[Name]
    groups: dict[_Values, set[int]]
    keys: dict[_Values, dict[int, None]]
    whole: bool
    varies: bool = False
    left_out: int = 0

    def values_of(self) -> dict[int, _Values]:
        return {rank: values for values, ranks in self.groups.items() for rank in ranks}

    def add(self, other: _Case, renamed: Mapping[_Values, _Values] | None = None) -> None:
        """`renamed`: this case's values for those of `other`."""
        for values, ranks in other.groups.items():
            here = renamed[values] if renamed else values
            self.groups.setdefault(here, set()).update(ranks)
            self.keys.setdefault(here, {}).update(other.keys[values])
        self.names |= other.names
        self.whole = self.whole and other.whole
        self.varies = self.varies or other.varies or renamed is not None
        self.left_out = max(self.left_out, other.left_out)


def divergences_of(timeline: Timeline, found: Findings, manifests: Iterable[Manifest]) -> list[Divergence]:
    """Faults first, the costliest of them first.

    Takes time in proportion to the spans, and to the keys of kernels with several groups.
    """
    asked = asked_of(timeline)
    separate = list(apart(asked))
    if not separate:
        return []
    seen = {number for _, groups in separate for group in groups for number in group.keys}
    wanted = {asked.keys[number][2] for number in seen}
    length = max(map(len, wanted))
    by_key = {m.key.digest[:length]: m for m in manifests if m.key.digest[:length] in wanted}
    kept = {number: by_key[asked.keys[number][2]] for number in seen if asked.keys[number][2] in by_key}
    cases = [case for name, groups in separate for case in _compared(name, groups, kept)]
    kernels = {(k.backend, k.name, k.key): k for k in found.kernels}
    judged = ((case, _remedy(case, asked)) for case in _varying(_alike(cases)))
    shown = [_divergence(case, remedy, kernels, asked) for case, remedy in judged if remedy is not None]
    return sorted(shown, key=lambda d: (d.expected, -d.seconds, -len(d.kernels), d.factors))


@dataclass(frozen=True)
class _Known:
    """A manifest with its key's details unpacked, and the key's factors as a flat set of names and digests."""

    manifest: Manifest
    facts: frozenset[tuple[str, str]]
    explained: bool

    @classmethod
    def of(cls, manifest: Manifest) -> _Known:
        key = whole_key(manifest)
        factors = (*key.factors, *key.details)
        plain = replace(manifest, key=key, details=b"")
        explained = bool(key.details) or not all(is_digest(f.text) for f in key.factors)
        return cls(plain, frozenset((name, factor.digest) for name, factor in flat(factors)), explained)

    def to(self, other: _Known) -> list[FactorDiff]:
        return telling_differences(self.manifest, other.manifest)


def _compared(name: Name, groups: Sequence[Ranks], kept: Mapping[int, Manifest]) -> Iterator[_Case]:
    """The differences of each group from the largest one whose keys are known, a case for each set of factors."""
    comparable = [(group.ranks, [n for n in group.keys if n in kept], len(group.keys)) for group in groups]
    comparable = [(who, keys, count) for who, keys, count in comparable if keys]
    if len(comparable) < 2:
        return
    (base, theirs, base_count), *others = comparable
    compared = [number for _, keys, _ in comparable[: _MOST_GROUPS + 1] for number in keys[:_MOST_COMPARED]]
    known = {number: _Known.of(kept[number]) for number in compared}
    cases: dict[tuple[str, tuple[str, ...]], _Case] = {}
    for who, keys, count in others[:_MOST_GROUPS]:
        pairs = _nearest(keys[:_MOST_COMPARED], theirs[:_MOST_COMPARED], known)
        whole = count == base_count == len({his for _, his, _ in pairs}) == len(keys) <= _MOST_COMPARED
        for kind, differences in _by_kind(pairs[0][2]).items():
            factors = tuple(d.name for d in differences)
            same = [(m, h) for m, h, d in pairs if tuple(x.name for x in _by_kind(d).get(kind, ())) == factors]
            ours = tuple("unset" if d.ours is None else d.ours for d in differences)
            mine = tuple("unset" if d.theirs is None else d.theirs for d in differences)
            keys_of = {ours: dict.fromkeys(h for _, h in same), mine: dict.fromkeys(m for m, _ in same)}
            left_out = max(0, len(others) - _MOST_GROUPS)
            fits = whole and len(same) == len(pairs)
            groups_of = {ours: set(base), mine: set(who)}
            fresh = _Case(kind, factors, {name}, groups_of, keys_of, fits, left_out=left_out)
            case = cases.get((kind, factors))
            if case is None:
                cases[kind, factors] = fresh
            elif ours in case.groups:
                case.add(fresh)
            else:  # the base's nearest key is another one this time, with another value
                case.add(fresh, {ours: next(iter(case.groups)), mine: mine})
    yield from cases.values()


def _nearest(
    mine: Sequence[int], theirs: Sequence[int], known: Mapping[int, _Known]
) -> list[tuple[int, int, list[FactorDiff]]]:
    """Each of `mine`, the one of `theirs` that differs least, and the differences ([]: unknown); the nearest pair first."""
    found = []
    for number in mine:
        facts = known[number].facts
        nearest = min(theirs, key=lambda other: len(known[other].facts ^ facts))
        explained = known[number].explained and known[nearest].explained
        differences = known[nearest].to(known[number]) if explained else []
        found.append((number, nearest, differences))
    return sorted(found, key=lambda pair: (not pair[2], len(pair[2])))


def _first_word(difference: FactorDiff) -> str:
    return difference.name.partition(" ")[0]


def _by_kind(differences: Sequence[FactorDiff]) -> dict[str, list[FactorDiff]]:
    """Surroundings and GPU, or else the rest: with these, other factors (options, say) differ as a consequence."""
    words = {"surroundings": _SURROUNDINGS, "gpu": _GPU}
    found = {kind: [d for d in differences if _first_word(d) in known] for kind, known in words.items()}
    return {kind: some for kind, some in found.items() if some} or ({"rest": list(differences)} if differences else {})


def _alike(cases: Iterable[_Case]) -> Iterator[_Case]:
    """Merges the cases of several kernels that have the same factors, with the same values for each rank."""
    found: dict[object, list[tuple[_Case, dict[int, _Values]]]] = defaultdict(list)
    for case in cases:
        values = case.values_of()
        identity = (case.kind, case.factors, frozenset(case.groups) if case.kind == "rest" else None)
        for known, theirs in found[identity][:_MOST_TRIED]:
            if all(theirs.get(rank, value) == value for rank, value in values.items()):
                known.add(case)
                theirs.update(values)
                break
        else:
            found[identity].append((case, values))
    for merged in found.values():
        yield from (case for case, _ in merged)


def _varying(cases: Iterable[_Case]) -> Iterator[_Case]:
    """Merges the cases of several kernels between the same ranks whose values are each kernel's own: a source's hash, say."""
    found: dict[object, _Case] = {}
    for case in cases:
        identity = (case.kind, case.factors, frozenset(frozenset(ranks) for ranks in case.groups.values()))
        known = found.setdefault(identity, case)
        if known is not case:
            here = {frozenset(ranks): values for values, ranks in known.groups.items()}
            known.add(case, {values: here[frozenset(ranks)] for values, ranks in case.groups.items()})
    yield from found.values()


def _remedy(case: _Case, asked: Asked) -> str | None:
    """A fault's remedy; empty if the case is expected, None if it is not shown."""
    if len(case.groups) < 2:
        return None
    if case.kind == "gpu":
        return ""
    if case.kind == "surroundings":
        return _REMEDIES.get(case.factors[0].partition(" ")[0], _INSTALL)
    if not case.whole:
        return None
    several = len(next(iter(case.keys.values()))) >= _EVIDENCE
    backends = {backend for backend, _ in case.names}
    every = asked.names({rank for ranks in case.groups.values() for rank in ranks})
    everywhere = several and all(name in case.names for name in every if name[0] in backends)
    if not case.varies and _follows_the_rank(case, asked):
        # ranks of a mere warm-up share nothing, and a variant may have its rank's number by coincidence
        elsewhere = (several or len(case.groups) > _EVIDENCE) and asked.share(case.groups.values())
        return _OWN if everywhere or elsewhere else None
    of_the_call = any(map(is_of_the_call, case.factors))
    return _OTHER if everywhere and not of_the_call else None


def _follows_the_rank(case: _Case, asked: Asked) -> bool:
    """True if a factor's value is each rank's own number, in the job or on its node: ``3``, ``cuda:3``."""
    for place in range(len(case.factors)):
        numbers = {values: _NUMBER.fullmatch(values[place]) for values in case.groups}
        for of_rank in ({rank: rank for rank in case.values_of()}, asked.local):
            if all(
                number is not None and all(of_rank.get(rank) == int(number[1]) for rank in case.groups[values])
                for values, number in numbers.items()
            ):
                return True
    return False


def _divergence(case: _Case, remedy: str, kernels: Mapping[tuple[str, str, str], Kernel], asked: Asked) -> Divergence:
    groups = [
        Group(
            tuple(sorted(who)),
            tuple(dict.fromkeys(node for rank in sorted(who) for node in asked.nodes[rank])),
            values,
            tuple(kernels[asked.keys[number]] for number in case.keys[values]),
        )
        for values, who in case.groups.items()
    ]
    groups.sort(key=lambda g: (-len(g.ranks), g.ranks))
    return Divergence(case.factors, tuple(groups), remedy, case.varies, case.left_out)
