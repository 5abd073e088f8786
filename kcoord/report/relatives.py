"""The nearest earlier artifact of the same kernel, and the factors in which two keys differ."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kcoord.artifacts.manifest import Manifest
from kcoord.errors import ArtifactInvalid
from kcoord.keys.cache_key import FactorDiff

_DIGEST = re.compile(r"[0-9a-f]{40,}|[A-Z2-7]{52}")  # in hex, and in base32
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
    """From `theirs` to `mine`, without digests if anything else differs: a compiler's own hash explains nothing."""
    differences = _diff(theirs, mine)
    told = [d for d in differences if not (" " not in d.name and is_digest(d.ours) and is_digest(d.theirs))]
    return told or differences


def is_digest(text: str | None) -> bool:
    """True if a factor's text is a hash, which tells people nothing."""
    return text is not None and _DIGEST.fullmatch(text) is not None


def _diff(theirs: Manifest, mine: Manifest) -> list[FactorDiff]:
    try:
        return theirs.explained.diff(mine.explained)
    except ArtifactInvalid:  # details that cannot be read; the key itself is whole
        return theirs.key.diff(mine.key)
