"""Why each kernel of a job was compiled: how its key differs from the nearest earlier artifact's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kcoord.artifacts.manifest import Manifest
from kcoord.report.findings import Findings, Kernel
from kcoord.report.relatives import nearest, telling_differences
from kcoord.telemetry.spans import KEY_DIGITS

_Differences = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Miss:
    """Kernels that were compiled for one reason. `differences` of their keys from an earlier artifact's: factor, before, now."""

    reason: str
    differences: _Differences
    kernels: tuple[Kernel, ...]

    @property
    def seconds(self) -> float:
        return sum(k.seconds for k in self.kernels)


def misses_of(manifests: Sequence[Manifest], began: float, found: Findings) -> list[Miss]:
    """One `Miss` for each reason, the longest compiles first.

    A kernel is compared with an artifact from before `began` (the job's, in Unix seconds) if there is one, else with one that the
    job made itself.
    """
    by_key = {m.key.digest[:KEY_DIGITS]: m for m in manifests}
    by_name: dict[tuple[str, str], list[Manifest]] = defaultdict(list)
    for manifest in manifests:
        by_name[manifest.key.backend, manifest.key.name].append(manifest)
    groups: dict[tuple[str, _Differences], list[Kernel]] = defaultdict(list)
    for kernel in found.compiled:
        groups[_reason(by_key.get(kernel.key), by_name, began)].append(kernel)
    misses = [Miss(reason, differences, tuple(kernels)) for (reason, differences), kernels in groups.items()]
    return sorted(misses, key=lambda m: -m.seconds)


def _reason(
    mine: Manifest | None, by_name: Mapping[tuple[str, str], list[Manifest]], began: float
) -> tuple[str, _Differences]:
    if mine is None:
        return "their artifacts are neither in the store nor on this node, so nothing can be said", ()
    if mine.origin.created < began:
        return "compiled before with this very key: it could not be fetched, or was not right for this GPU", ()
    relatives = by_name[mine.key.backend, mine.key.name]  # the manifest's: a span's name may be cut
    older = [m for m in relatives if m.origin.created < began]
    theirs = nearest(older, mine) or nearest(relatives, mine)
    if theirs is None:
        return "never compiled before", ()
    differences = tuple((d.name, d.ours or "unset", d.theirs or "unset") for d in telling_differences(theirs, mine))
    which = "this factor" if len(differences) == 1 else "these factors"
    if older:
        return f"compiled before, with another value of {which}", differences
    return f"new in this job, which has compiled another of the same name that differs in {which}", differences
