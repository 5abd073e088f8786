"""Withdrawal of artifacts by keys or compilers, after a miscompile: out of a store, of its packs, and of this node.

A pack that holds one goes whole: a later job writes it again. Everything goes into the trash, as by a collection: a rank that
reads a file goes on. Not guaranteed: that a process which has loaded an artifact, or a running agent which has read its pack,
forgets it; end the jobs that use it. Other nodes keep their copies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kcoord.artifacts import toolchains
from kcoord.artifacts.catalog import local_manifests
from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid
from kcoord.files.atomic import LAYOUT
from kcoord.files.faults import store_errors
from kcoord.files.trash import Trash
from kcoord.keys.cache_key import Factor
from kcoord.packs.index import PackInvalid
from kcoord.packs.pack import look_at_pack
from kcoord.packs.pack_files import all_packs

_WHOLE = 64  # digits of a key


@dataclass
class Withdrawn:
    """`artifacts` and `packs`: paths that were moved to the trash. `refused`: those that this user may not move."""

    artifacts: list[Path] = field(default_factory=list)
    packs: list[Path] = field(default_factory=list)
    refused: list[Path] = field(default_factory=list)


def withdraw(keys: Collection[str], store: Store | None, local_dir: Path, dry_run: bool = False) -> Withdrawn:
    """Take the artifacts whose digests begin with one of `keys` out of `store`, if there is one, and of `local_dir`.

    `dry_run`: only look. Raises `StoreError`.
    """
    found = Withdrawn()

    whole = {key for key in keys if len(key) == _WHOLE}
    parts = tuple(set(keys) - whole)

    def wanted(digest: str) -> bool:
        return digest in whole or digest.startswith(parts)

    def take(into: list[Path], path: Path, directory: Path, root: Path) -> None:
        taken = dry_run or Trash(directory / "trash", root).take(path) is not None
        (into if taken else found.refused).append(path)

    if store is not None:
        with store_errors(store.root):
            # packs first: an agent that begins meanwhile would fetch from them
            for pack, _ in all_packs(store.root):
                if _holds(store, pack, wanted):
                    take(found.packs, pack, store.root / LAYOUT, store.root)
            for path, _ in store.objects():
                if wanted(path.name):
                    take(found.artifacts, path, store.root / LAYOUT, store.root)
    with store_errors(local_dir):
        for home in list(_homes(local_dir, wanted)):
            if not dry_run:
                (home.parent / ".kcoord").mkdir(mode=0o700, exist_ok=True)
            take(found.artifacts, home, home.parent / ".kcoord", home.parent)
    return found


def made_with(
    store: Store | None, local_dir: Path, digest: str | None, compilers: Collection[tuple[str, str]]
) -> set[str]:
    """The keys of the artifacts that a compiler of the toolchain `digest` has made, or one of these names and releases.

    A release is that of a recorded compiler (``gcc``), or one that a factor of the key states (``triton``). Reads all manifests
    and packs. Raises `StoreError`.
    """
    known = toolchains.toolchains(store) if store is not None else {}
    bad = [each for key, each in known.items() if digest is not None and key.startswith(digest)]
    contents = {toolchains.contents(tools) for each in bad for tools in each.tools.values()}
    for name, release in compilers:
        contents |= {toolchains.contents(e.tools[name]) for e in known.values() if e.releases.get(name) == release}
    stated = {name: re.compile(rf"(?<![\w.]){re.escape(release)}(?![\w.])") for name, release in compilers}

    def is_meant(manifest: Manifest) -> bool:
        with suppress(ArtifactInvalid):
            manifest = replace(manifest, key=manifest.explained)
        return not contents.isdisjoint(toolchains.compilers_in(manifest.key)) or any(
            each.name in stated and stated[each.name].search(each.text)
            for each in _all_factors((*manifest.key.factors, *manifest.key.details))
        )

    return {each.key.digest for each in _all_manifests(store, local_dir) if is_meant(each)}


def _all_factors(factors: Collection[Factor]) -> Iterator[Factor]:
    for factor in factors:
        yield factor
        yield from _all_factors(factor.parts)


def _all_manifests(store: Store | None, local_dir: Path) -> Iterator[Manifest]:
    if store is not None:
        yield from store.manifests()
        for place, _ in all_packs(store.root):
            with suppress(PackInvalid, ArtifactInvalid), look_at_pack(store, place) as pack:
                yield from (each.manifest for each in pack.objects())
    with store_errors(local_dir):
        for path in list(local_manifests(local_dir)):
            with suppress(ArtifactInvalid, OSError):
                yield Manifest.read(path.parent)


def _holds(store: Store, place: Path, wanted: Callable[[str], bool]) -> bool:
    try:
        with look_at_pack(store, place) as pack:
            return any(map(wanted, pack.digests))
    except PackInvalid:
        return False  # nobody reads it


def _homes(local_dir: Path, wanted: Callable[[str], bool]) -> Iterator[Path]:
    for path in local_manifests(local_dir):
        try:
            digest = Manifest.read(path.parent).key.digest
        except (ArtifactInvalid, OSError):
            continue  # nobody loads it
        if wanted(digest):
            yield path.parent
