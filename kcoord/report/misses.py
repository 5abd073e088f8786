"""Why each kernel of a job was compiled: how its key differs from the nearest earlier artifact's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kcoord.artifacts.manifest import Manifest
from kcoord.report.findings import Findings, Kernel
from kcoord.report.relatives import nearest, telling_differences
from kcoord.telemetry.spans import KEY_DIGITS

Differences = tuple[tuple[str, str, str], ...]
"""Of two keys: factor, before, now."""

UNKNOWN = "their artifacts are neither in the store nor on this node, so the reason is unknown"


@dataclass(frozen=True)
class Miss:
    """Kernels that were compiled for one reason, with the `differences` of their keys from an earlier artifact's."""

    reason: str
    differences: Differences
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
    return grouped((kernel, *_reason(by_key.get(kernel.key), by_name, began)) for kernel in found.compiled)


def grouped(explained: Iterable[tuple[Kernel, str, Differences]]) -> list[Miss]:
    """One `Miss` for each reason with its differences, the longest compiles first."""
    groups: dict[tuple[str, Differences], list[Kernel]] = defaultdict(list)
    for kernel, reason, differences in explained:
        groups[reason, differences].append(kernel)
    misses = [Miss(reason, differences, tuple(kernels)) for (reason, differences), kernels in groups.items()]
    return sorted(misses, key=lambda m: -m.seconds)


def _reason(
    mine: Manifest | None, by_name: Mapping[tuple[str, str], list[Manifest]], began: float
) -> tuple[str, Differences]:
    if mine is None:
        return UNKNOWN, ()
    if mine.origin.created < began:
        return "compiled before with this very key: it could not be fetched, or was not right for this GPU", ()
    relatives = by_name[mine.key.backend, mine.key.name]  # the manifest's: a span's name may be cut
    older = [m for m in relatives if m.origin.created < began]
    theirs = nearest(older, mine) or nearest(relatives, mine)
    if theirs is None:
        return "never compiled before", ()
    differences = differences_of(theirs, mine)
    if older:
        return f"compiled before, with another value of {these(differences)}", differences
    return (
        f"new in this job, which has compiled another of the same name that differs in {these(differences)}",
        differences,
    )


def differences_of(theirs: Manifest, mine: Manifest) -> Differences:
    return tuple((d.name, d.ours or "unset", d.theirs or "unset") for d in telling_differences(theirs, mine))


def these(differences: Differences) -> str:
    return "this factor" if len(differences) == 1 else "these factors"
