"""The nearest artifact of the same kernel, and the factors in which keys differ."""

from __future__ import annotations

from collections.abc import Iterable

from kcoord.artifacts.manifest import Manifest
from kcoord.errors import ArtifactInvalid
from kcoord.keys.cache_key import CacheKey, FactorDiff
from kcoord.keys.variants import is_digest

_MOST_COMPARED = 200  # of one kernel's artifacts; the newest


def nearest(found: Iterable[Manifest], mine: Manifest, *, at_any_time: bool = False) -> Manifest | None:
    """The earlier artifact (or one `at_any_time`) of the same kernel whose key differs least; the later of two that differ
    equally.
    """
    relatives = [
        m
        for m in found
        if (m.key.backend, m.key.name) == (mine.key.backend, mine.key.name)
        and m.key.digest != mine.key.digest
        and (at_any_time or m.origin.created <= mine.origin.created)
    ]
    relatives.sort(key=lambda m: -m.origin.created)
    return min(relatives[:_MOST_COMPARED], key=lambda m: len(_diff(m, mine)), default=None)


def telling_differences(theirs: Manifest, mine: Manifest) -> list[FactorDiff]:
    """From `theirs` to `mine`, without digests if anything else differs: a compiler's own hash explains nothing."""
    differences = _diff(theirs, mine)
    told = [d for d in differences if not (" " not in d.name and is_digest(d.ours) and is_digest(d.theirs))]
    return told or differences


def whole_key(manifest: Manifest) -> CacheKey:
    """The key with its details, or without them if they cannot be read: the key itself is whole."""
    try:
        return manifest.explained
    except ArtifactInvalid:
        return manifest.key


def _diff(theirs: Manifest, mine: Manifest) -> list[FactorDiff]:
    try:
        return theirs.explained.diff(mine.explained)
    except ArtifactInvalid:  # with the details of one alone, all of them would differ
        return theirs.key.diff(mine.key)
