"""Both merges of old files of profiles, each apart from the other's faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kcoord.artifacts.signing import Trust
from kcoord.errors import KcoordError
from kcoord.profiles.compaction import compact, compact_requested


def compact_profiles(
    store: Path, trust: Callable[[], Trust], failed: Callable[[str, KcoordError], None], most: int | None = None
) -> dict[str, int]:
    """Merge at most `most` old parts of profiles, and as many old lists of needs; returns how many files went of each.

    ``failed(files, error)`` is called for a merge that raises; `trust`, which may raise too, is asked for parts only.
    """
    merges: dict[str, Callable[[], int]] = {
        "parts of profiles": lambda: compact(store, trust(), most),
        "lists of needs": lambda: compact_requested(store, most),
    }
    gone = {}
    for files, merge in merges.items():
        try:
            gone[files] = merge()
        except KcoordError as error:
            failed(files, error)
    return gone
