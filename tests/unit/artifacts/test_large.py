"""Artifacts of more than 64 MiB: hashed, copied and sent piece by piece. Smaller ones are read once."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kcoord.agent.expectations import Expectations
from kcoord.agent.packs import UsedArtifacts
from kcoord.agent.tiers import Tiers
from kcoord.artifacts import local
from kcoord.artifacts.manifest import LARGEST_IN_MEMORY, Origin
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid
from kcoord.telemetry.events import Notices
from tests.support.agents import key_of, stage

KEY, SIZE = key_of("large"), LARGEST_IN_MEMORY + (32 << 20)
ORIGIN = Origin.here(1, 0, "")


def staged(home: Path, size: int = SIZE) -> Path:
    """A file with a hole, which takes no room on the disk, and a smaller one beside it."""
    staging = local.new_staging(home)
    with (staging / "kernel.bin").open("wb") as file:
        file.write(b"code")
        file.truncate(size)
    (staging / "deep").mkdir()
    (staging / "deep" / "kernel.json").write_text('{"path": "@KCOORD_HOME@/kernel.bin"}')
    return staging


def published(home: Path, size: int = SIZE) -> local.Artifact:
    return local.publish_local(staged(home, size), home, KEY, 1.0, ORIGIN)


@contextmanager
def little_memory(most: int = 24 << 20) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.open()
    return made


def test_a_large_artifact_is_published_verified_and_sent_piece_by_piece(tmp_path: Path, store: Store) -> None:
    home = tmp_path / "homes" / "k"
    with little_memory():
        artifact = published(home)
        assert local.open_artifact(home, KEY.digest) == artifact
        found = local.contents_at(home, KEY.digest)
        assert found is not None
        announced = store.publish(*found)
    fetched = store.fetch(KEY.digest, announced)
    assert fetched is not None
    manifest, contents, _ = fetched
    there = local.install(manifest, contents, tmp_path / "other" / "k")
    assert [file.sha256 for file in there.manifest.files] == [file.sha256 for file in artifact.manifest.files]
    assert str(tmp_path / "other" / "k") in (there.path / "deep" / "kernel.json").read_text()


def test_a_large_artifact_is_brought_to_another_home_piece_by_piece(tmp_path: Path) -> None:
    home, other = tmp_path / "rank0" / "k", tmp_path / "rank1" / "k"
    published(home)
    tiers = Tiers(
        None, None, Notices(), expectations=Expectations(0.0, 0.0), used=UsedArtifacts(tmp_path)
    )  # fmt: skip
    with little_memory():
        assert asyncio.run(tiers.bring_home(KEY.digest, home, other))
    assert (other / "kernel.bin").stat().st_size == SIZE
    assert str(other) in (other / "deep" / "kernel.json").read_text()
    tiers.close()


def test_what_was_altered_since_is_neither_sent_nor_copied(tmp_path: Path, store: Store) -> None:
    home = tmp_path / "homes" / "k"
    published(home)
    with (home / "kernel.bin").open("r+b") as file:
        file.write(b"CODE")
    found = local.contents_at(home, KEY.digest)
    assert found is not None
    with pytest.raises(ArtifactInvalid, match="SHA-256"):
        store.publish(*found)
    with pytest.raises(ArtifactInvalid, match="SHA-256"):
        local.install(*found, tmp_path / "other" / "k")
    assert list(store.digests()) == []
    assert not list((store.root / "v2" / "staging").iterdir())
    assert not (tmp_path / "other" / "k").exists()


@pytest.mark.parametrize("left", [0, SIZE - 1, None], ids=["empty", "shorter", "missing"])
def test_a_file_that_this_node_has_lost_is_no_fault_of_the_store(
    tmp_path: Path, store: Store, left: int | None
) -> None:
    home = tmp_path / "homes" / "k"
    published(home)
    found = local.contents_at(home, KEY.digest)
    assert found is not None
    if left is None:
        (home / "kernel.bin").unlink()
    else:
        with (home / "kernel.bin").open("r+b") as file:
            file.truncate(left)
    with pytest.raises(ArtifactInvalid):
        store.publish(*found)


def test_bytes_that_compress_well_are_taken_by_other_nodes(tmp_path: Path, store: Store) -> None:
    home = tmp_path / "homes" / "k"
    published(home, 128 << 20)  # as a sparse file: zstd makes 128 KiB of four bytes, and a reader takes no more
    found = local.contents_at(home, KEY.digest)
    assert found is not None
    announced = store.publish(*found)
    fetched = store.fetch(KEY.digest, announced)
    assert fetched is not None
    assert len(fetched[1]["kernel.bin"]) == 128 << 20


def test_a_small_artifact_is_read_once_on_its_way_into_the_store(tmp_path: Path, store: Store) -> None:
    async def scenario() -> str | None:
        tiers = Tiers(
            store, None, Notices(), expectations=Expectations(0.0, 0.0), used=UsedArtifacts(tmp_path)
        )  # fmt: skip
        home = tmp_path / "homes" / "k"
        await tiers.publish_locally(stage(home), home, KEY, 1.0, ORIGIN)
        (home / "kernel.txt").write_text("another kernel")
        try:
            return await tiers.into_store(KEY.digest, home)
        finally:
            tiers.close()

    announced = asyncio.run(scenario())
    assert announced is not None
    fetched = store.fetch(KEY.digest, announced)
    assert fetched is not None
    assert fetched[1] == {"kernel.txt": b"a kernel"}
