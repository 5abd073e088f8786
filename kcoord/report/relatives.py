"""The nearest earlier artifact of the same kernel, and the factors in which two keys differ."""

from __future__ import annotations

from collections.abc import Iterable

from kcoord.artifacts.manifest import Manifest
from kcoord.errors import ArtifactInvalid
from kcoord.keys.cache_key import FactorDiff

_OPAQUE = ("triton_key", "source")  # hashes of what other factors explain
_MOST_COMPARED = 200  # of one kernel's artifacts; the newest


def nearest(found: Iterable[Manifest], mine: Manifest) -> Manifest | None:
    """The earlier artifact of the same kernel whose key differs least; the later of two that differ equally."""
    relatives = [
        m
        for m in found
        if (m.key.backend, m.key.name) == (mine.key.backend, mine.key.name)
        and m.key.digest != mine.key.digest
        and m.origin.created <= mine.origin.created
    ]
    relatives.sort(key=lambda m: -m.origin.created)
    return min(relatives[:_MOST_COMPARED], key=lambda m: len(_diff(m, mine)), default=None)


def telling_differences(theirs: Manifest, mine: Manifest) -> list[FactorDiff]:
    """The differences from `theirs` to `mine`, without opaque hashes if other factors differ as well."""
    differences = _diff(theirs, mine)
    return [d for d in differences if d.name not in _OPAQUE] or differences


def _diff(theirs: Manifest, mine: Manifest) -> list[FactorDiff]:
    try:
        return theirs.explained.diff(mine.explained)
    except ArtifactInvalid:  # details that cannot be read; the key itself is whole
        return theirs.key.diff(mine.key)
