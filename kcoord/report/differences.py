"""Why kernels were compiled: the most similar earlier artifact of the same name, and the factors in which the keys differ."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kcoord.artifacts.manifest import Manifest
from kcoord.errors import ArtifactInvalid
from kcoord.keys.cache_key import FactorDiff
from kcoord.report.findings import Findings, Kernel
from kcoord.telemetry.spans import KEY_DIGITS

_MOST_COMPARED = 200  # of one kernel's artifacts; the newest
_DIGEST = re.compile(r"[0-9a-f]{40,}|[A-Z2-7]{52}")  # in hex, and in base32

Differences = tuple[tuple[str, str, str], ...]
"""Of two keys: factor, before, now."""


@dataclass(frozen=True)
class Miss:
    """Kernels that were compiled for one reason, with the `differences` of their keys from an earlier artifact's."""

    reason: str
    differences: Differences
    kernels: tuple[Kernel, ...]

    @property
    def seconds(self) -> float:
        return sum(k.seconds for k in self.kernels)


def misses_of(manifests: Iterable[Manifest], began: float, found: Findings) -> list[Miss]:
    """The reasons for each compile. `began`: Unix seconds of the job's begin; artifacts from before it are compared first."""
    by_key, by_name = by_key_and_name(manifests)
    return grouped((kernel, *_reason(by_key.get(kernel.key), by_name, began)) for kernel in found.compiled)


def by_key_and_name(
    manifests: Iterable[Manifest],
) -> tuple[dict[str, Manifest], dict[tuple[str, str], list[Manifest]]]:
    """Manifests by their key as spans have it, and by backend and name."""
    by_key: dict[str, Manifest] = {}
    by_name: dict[tuple[str, str], list[Manifest]] = defaultdict(list)
    for manifest in manifests:
        by_key[manifest.key.digest[:KEY_DIGITS]] = manifest
        by_name[manifest.key.backend, manifest.key.name].append(manifest)
    return by_key, by_name


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
        return "their artifacts are neither in the store nor on this node, so the reason is unknown", ()
    if mine.origin.created < began:
        return "compiled before with this very key: it could not be fetched, or was not right for this GPU", ()
    relatives = by_name[mine.key.backend, mine.key.name]  # the manifest's: a span's name may be cut
    older = [m for m in relatives if m.origin.created < began]
    theirs = nearest(older, mine) or nearest(earlier(relatives, mine), mine)
    if theirs is None:
        return "never compiled before", ()
    when = "before" if older else "in this job"
    return f"compiled {when} with another value of these factors", differences_of(theirs, mine)


def earlier(found: Iterable[Manifest], mine: Manifest) -> list[Manifest]:
    return [m for m in found if m.origin.created <= mine.origin.created]


def nearest(found: Iterable[Manifest], mine: Manifest) -> Manifest | None:
    """The artifact of the same kernel whose key differs least from `mine`; the newer of two that differ equally."""
    same = [m for m in found if (m.key.backend, m.key.name) == (mine.key.backend, mine.key.name)]
    others = sorted((m for m in same if m.key.digest != mine.key.digest), key=lambda m: -m.origin.created)
    return min(others[:_MOST_COMPARED], key=lambda m: len(_diff(m, mine)), default=None)


def factor_diffs(theirs: Manifest, mine: Manifest) -> list[FactorDiff]:
    """From `theirs` to `mine`, without hashes if anything else differs: a compiler's own hash explains nothing."""
    differences = _diff(theirs, mine)
    return [d for d in differences if " " in d.name or not (_is_digest(d.ours) and _is_digest(d.theirs))] or differences


def differences_of(theirs: Manifest, mine: Manifest) -> Differences:
    return tuple((d.name, d.ours or "unset", d.theirs or "unset") for d in factor_diffs(theirs, mine))


def _is_digest(text: str | None) -> bool:
    return text is not None and _DIGEST.fullmatch(text) is not None


def _diff(theirs: Manifest, mine: Manifest) -> list[FactorDiff]:
    try:
        return theirs.explained.diff(mine.explained)
    except ArtifactInvalid:  # with the details of one alone, all of them would differ
        return theirs.key.diff(mine.key)
