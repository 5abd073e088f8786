"""Keys of one kernel compared: the factors in which they differ, and those that keep ranks from sharing it.

A difference between ranks counts only in factors that all ranks of a job should share (`_REMEDIES`). Others are no fault:
pipeline stages run one kernel with other sizes, a warm-up deals out configurations, and GPUs may be of several kinds.

Not guaranteed: that a difference is found where artifacts are gone or spans are missing. Code that differs between nodes is not
told from code that differs between stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.many_keys import is_digest
from kcoord.errors import ArtifactInvalid
from kcoord.keys.cache_key import FactorDiff
from kcoord.report.edits import diff, short_name, short_text
from kcoord.report.findings import Findings, Kernel
from kcoord.report.timeline import Timeline
from kcoord.telemetry.spans import KEY_DIGITS, plain_text
from kcoord.units import first_few

_MOST_COMPARED = 200  # of one kernel's artifacts; the newest
_MOST_GROUPS = 64  # of one kernel's ranks
_FEW = 4  # factors that tell keys apart
_LONGEST_VALUE = 40  # characters
_MOST_RANGES = 8
_MOST_NODES = 3
_INSTALLED = (
    "compiler", "compilers", "driver", "host libraries", "libc", "machine", "packages", "platform", "python", "toolchain",
    "tools", "torch", "triton", "version", "versions",
)  # fmt: skip
_OWN = "pass it when the kernel is launched, if all ranks are to run the same code"
_REMEDIES = {
    **dict.fromkeys(_INSTALLED, "install the same on all nodes"),
    **dict.fromkeys(("env", "environment", "knobs"), "set it alike on all nodes"),
    **dict.fromkeys(("globals", "closure"), _OWN),
    "trees": "copy the same files to all nodes",
    "device_id": "if the code is the same for each GPU of a node, say so with scope=kcoord.Scope.TARGET",
}

Differences = tuple[tuple[str, str, str], ...]
"""Of two keys: factor, before, now."""


def nearest(found: Iterable[Manifest], mine: Manifest) -> Manifest | None:
    """The artifact of the same kernel whose key differs least from `mine`; the newer of two that differ equally."""
    same = [m for m in found if (m.key.backend, m.key.name) == (mine.key.backend, mine.key.name)]
    others = sorted((m for m in same if m.key.digest != mine.key.digest), key=lambda m: -m.origin.created)
    return min(others[:_MOST_COMPARED], key=lambda m: len(_diff(m, mine)), default=None)


def relative_of(found: Iterable[Manifest], mine: Manifest) -> tuple[Manifest | None, bool]:
    """The artifact of an earlier run whose key differs least from `mine`, and False.

    If there is none: the one of the same process that is older than `mine` and differs least, and True. A manifest names a
    process and no run: a run is earlier if the rank that compiled in it has compiled as another process since; else other
    processes' artifacts count. Not guaranteed: that artifacts of other ranks in the same run are known as such.
    """
    older = sorted((m for m in found if m.origin.created <= mine.origin.created), key=lambda m: m.origin.created)
    latest = {(m.origin.host, m.origin.rank): m.origin.pid for m in older}
    earlier = [m for m in older if m.origin.pid != latest[m.origin.host, m.origin.rank]]
    others = [m for m in older if m.origin[:3] != mine.origin[:3] or not m.origin.pid]  # 0: it had no agent
    theirs = nearest(earlier, mine) or nearest(others, mine)
    sibling = nearest(older, mine) if theirs is None else None
    return theirs or sibling, sibling is not None


def factor_diffs(theirs: Manifest, mine: Manifest) -> list[FactorDiff]:
    """From `theirs` to `mine`, for people: with the edit of each file, and without hashes if anything else differs, since a
    compiler's own hash explains nothing.
    """
    differences = _diff(theirs, mine)
    return [d for d in differences if " " in d.name or not (is_digest(d.ours) and is_digest(d.theirs))] or differences


def distinguishing_factors(manifests: Iterable[Manifest]) -> dict[str, str]:
    """By digest, the factors in which each key differs from the first of its kernel, and the first from the others:
    ``BLOCK=64, num_warps=4``. A graph of a model has its modules.
    """
    by_name: dict[tuple[str, str], list[Manifest]] = defaultdict(list)
    for manifest in manifests:
        by_name[manifest.key.backend, manifest.key.name].append(manifest)
    found: dict[str, str] = {}
    for first, *others in by_name.values():
        pairs = [(m, _differences(first, m)) for m in others if m.key.digest != first.key.digest]
        usual = {name: before for _, differences in pairs for name, before, _ in differences}
        for manifest, differences in [(first, ()), *pairs]:
            values = {**usual, **{name: now for name, _, now in differences}}
            texts = [
                f"{short_name(name)}={plain_text(short_text(name, values[name]), _LONGEST_VALUE)}"
                for name in sorted(values)
            ]
            found[manifest.key.digest] = plain_text(first_few(list(dict.fromkeys(texts)), _FEW)) or _modules(manifest)
    return found


@dataclass
class Group:
    """Ranks whose keys have the same values, and their nodes."""

    ranks: set[int] = field(default_factory=set)
    nodes: list[str] = field(default_factory=list)

    @property
    def ranges(self) -> list[str]:
        """The ranks as Slurm writes them: ``["0-7", "9"]``."""
        found: list[list[int]] = []
        for rank in sorted(self.ranks):
            if found and rank == found[-1][-1] + 1:
                found[-1] = [found[-1][0], rank]
            else:
                found.append([rank])
        return ["-".join(map(str, each)) for each in found]

    @property
    def ranks_text(self) -> str:
        """``ranks 0-7, 9``."""
        found = self.ranges
        more = f" and more, {len(self.ranks):,} in all" if len(found) > _MOST_RANGES else ""
        return f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(found[:_MOST_RANGES])}{more}"

    @property
    def nodes_text(self) -> str:
        return first_few(self.nodes, _MOST_NODES)


@dataclass
class Divergence:
    """Kernels of which some ranks share no key, because the keys differ in `factors`. `groups`: ranks by value, most ranks first.

    `seconds` of compiling that equal keys would have saved.
    """

    factors: tuple[str, ...]
    groups: dict[tuple[str, ...], Group] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)  # by key
    seconds: float = 0.0

    @property
    def remedy(self) -> str:
        return _REMEDIES[self.factors[0].partition(" ")[0]]


def divergences_of(timeline: Timeline, found: Findings, manifests: Iterable[Manifest]) -> list[Divergence]:
    """The costliest first. Processes without a rank are left out; of one kernel the first 64 groups are compared."""
    by_key = {manifest.key.digest[:KEY_DIGITS]: manifest for manifest in manifests}
    kernels = {((k.backend, k.name), k.key): k for k in found.kernels}
    asked: dict[tuple[str, str], dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    node_of: dict[int, str] = {}
    for process, span in timeline.spans():
        if process.rank is not None and not span.aside:
            node_of[process.rank] = process.node
            asked[span.backend, span.name][span.key].add(process.rank)
    cases: dict[tuple[str, ...], Divergence] = {}
    for name, ranks_of in asked.items():
        groups = [group for group in _linked(ranks_of) if any(key in by_key for key in group[1])]
        for ranks, keys in groups[1:_MOST_GROUPS]:
            first_ranks, first_keys = groups[0]
            mine = next(by_key[key] for key in keys if key in by_key)
            theirs = nearest([by_key[key] for key in first_keys if key in by_key], mine)
            differences = _differences(theirs, mine) if theirs is not None else ()
            shared = [each for each in differences if each[0].partition(" ")[0] in _REMEDIES]
            if shared:
                factors, before, now = zip(*shared, strict=True)
                case = cases.setdefault(factors, Divergence(factors))
                case.groups.setdefault(before, Group()).ranks |= first_ranks
                case.groups.setdefault(now, Group()).ranks |= ranks
                case.kernels |= {key: kernels[name, key] for key in first_keys}
                case.seconds += sum(kernels[name, key].seconds for key in keys)
    for case in cases.values():
        case.groups = dict(sorted(case.groups.items(), key=lambda g: (-len(g[1].ranks), min(g[1].ranks))))
        for group in case.groups.values():
            group.nodes = list(dict.fromkeys(node_of[rank] for rank in sorted(group.ranks)))
    return sorted(cases.values(), key=lambda case: (-case.seconds, case.factors))


def _linked(ranks_of: Mapping[str, set[int]]) -> list[tuple[set[int], list[str]]]:
    """Ranks that asked for common keys of one kernel, directly or through other ranks, with these keys; the most ranks first."""
    of: dict[int, tuple[set[int], list[str]]] = {}  # by rank
    for key, ranks in ranks_of.items():
        common = {id(of[rank]): of[rank] for rank in ranks if rank in of}.values()
        joined = ranks.union(*(group[0] for group in common)), [*(k for group in common for k in group[1]), key]
        of.update(dict.fromkeys(joined[0], joined))
    return sorted(
        {id(group): group for group in of.values()}.values(), key=lambda group: (-len(group[0]), min(group[0]))
    )


def _differences(theirs: Manifest, mine: Manifest) -> Differences:
    return tuple((d.name, d.ours or "unset", d.theirs or "unset") for d in factor_diffs(theirs, mine))


def _modules(manifest: Manifest) -> str:
    """The modules of a graph of torch.compile; empty for other kernels."""
    if not manifest.details:
        return ""
    try:
        details = manifest.explained.details
    except ArtifactInvalid:
        return ""
    return next((plain_text(each.text, 2 * _LONGEST_VALUE) for each in details if each.name == "modules"), "")


def _diff(theirs: Manifest, mine: Manifest) -> list[FactorDiff]:
    try:
        return diff(theirs.explained, mine.explained)
    except ArtifactInvalid:  # with the details of one alone, all of them would differ
        return diff(theirs.key, mine.key)
