"""Toolchains in a store: found by digest and by name, and trusted as artifacts are."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcoord.artifacts import choices, toolchains
from kcoord.artifacts.manifest import Origin
from kcoord.artifacts.signing import Key, Trust
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, StoreError
from kcoord.keys.tools.record import Toolchain

ANSWERS = {"--version": ["gcc 12.2.0\n", "", 0], "-dumpfullversion": ["", "", 1]}
GCC = Toolchain("Linux", "x86_64", {"gcc": {"gcc": "ab" * 32}}, {"gcc": ANSWERS})


def signed(root: Path, seed: int) -> Store:
    store = Store(root / "store", Trust("require", {f"key-{seed}": Key.of_seed(bytes([seed]) * 32)}))
    store.open()
    return store


def publish(store: Store, toolchain: Toolchain) -> str:
    content = toolchain.encode()
    store.publish(choices.manifest_of(toolchain.key, content, 0.0, Origin()), choices.contents_of(content))
    return toolchain.key.digest


def test_a_toolchain_is_found_by_digest_and_name_and_the_name_outlives_the_record(tmp_path: Path) -> None:
    store = signed(tmp_path, 1)
    digest = publish(store, GCC)
    toolchains.give_name(store, toolchains.found(store, digest[:12]), "ours")
    assert (toolchains.found(store, digest), toolchains.found(store, "ours")) == (GCC, GCC)
    store.home(digest).unlink()
    assert (toolchains.named(store), toolchains.toolchains(store)) == ({"ours": GCC}, {digest: GCC})
    with pytest.raises(StoreError, match="kcoord toolchain ls"):
        toolchains.found(store, digest[:12])


def test_a_toolchain_that_another_key_or_nobody_has_signed_is_refused(tmp_path: Path) -> None:
    store = signed(tmp_path, 1)
    digest = publish(store, GCC)
    toolchains.give_name(store, GCC, "ours")
    stranger = signed(tmp_path, 2)
    for text in (digest, "ours"):
        with pytest.raises(ArtifactDistrusted):
            toolchains.found(stranger, text)
    toolchains.give_name(Store(store.root), GCC, "unsigned")
    with pytest.raises(ArtifactDistrusted):
        toolchains.found(store, "unsigned")
    assert toolchains.named(store) == {"ours": GCC}


def test_an_artifact_of_another_kind_is_no_toolchain(tmp_path: Path) -> None:
    store = signed(tmp_path, 1)
    content = b"[1]"
    key = GCC.key.with_factors(more=1)
    store.publish(choices.manifest_of(key, content, 0.0, Origin()), choices.contents_of(content))
    with pytest.raises(ArtifactInvalid):
        toolchains.found(store, key.digest)
