"""Packs for tests: what jobs used, as their agents would list it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kcoord.artifacts import local
from kcoord.artifacts.store import Store
from kcoord.packs.index import Use
from kcoord.packs.pack import look_at_pack
from kcoord.packs.recipe import today
from kcoord.packs.writing import write_pack


def uses(digests: Iterable[str], ago: int = 0) -> list[Use]:
    """Uses of so many days ago, each at its artifact's usual place."""
    return [Use(digest, local.place_of(digest), today() - ago) for digest in digests]


def pack(store: Store, digests: Iterable[str], profile: str = "job", ago: int = 0) -> set[str]:
    """Write a pack; the digests of the artifacts whose bytes it has."""
    return {packed.use.digest for packed in write_pack(store, profile, uses(digests, ago)).packed}


def packed_in(store: Store, path: Path) -> set[str]:
    """The digests of the artifacts whose bytes the pack has."""
    with look_at_pack(store, path) as found:
        return set(found.digests)


def listed_in(store: Store, path: Path) -> dict[str, Use]:
    """All that its index lists."""
    with look_at_pack(store, path) as found:
        return {use.digest: use for use in found.index.uses}
