"""The artifacts that pinned profiles keep in the store: those that their jobs asked for."""

from __future__ import annotations

from pathlib import Path

from kcoord.artifacts.store_root import check_is_store
from kcoord.profiles.requested import RequestedArtifact, all_requested, requested_directory
from kcoord.retention.pins import load_pins, pin


def pin_profile(store: Path, profile: str) -> set[str]:
    """Pin `profile`; returns the digests that it keeps: those that were asked for under its name until now.

    Raises `StoreError` if they cannot be read, and then nothing is pinned. Not guaranteed: that each is in the store.
    """
    return pin(store, profile, {need.digest for need in all_requested(requested_directory(store, profile))})


def pinned_digests(store: Path, *, note: bool = True) -> set[str]:
    """All digests that pins keep now. New ones are added to the pins; with `note` false nothing is written.

    Raises `StoreError`: then nobody may remove anything.
    """
    kept: set[str] = set()
    for profile, held in load_pins(store).items():
        asked = {need.digest for need in all_requested(requested_directory(store, profile))}
        kept |= held | asked
        if note and not asked <= held:
            pin(store, profile, asked, anew=False)
    return kept


def pinned_needs(store: Path) -> set[RequestedArtifact]:
    """As `pinned_digests`, with the places in the local tier, as far as the lists of needs can be read now. Nothing is written.

    Raises `StoreError`, also where there is no store: its mount may have vanished, and its pins with it.
    """
    check_is_store(store)
    return {need for profile in load_pins(store) for need in all_requested(requested_directory(store, profile))}
