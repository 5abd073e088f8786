"""The conformance suite of a store: inherit `StoreConformance`, give it `make_store`, and run it with pytest.

A store carries artifacts between nodes: every reader gets the whole artifact that was published, or none.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kcoord.artifacts.manifest import FileEntry, Manifest, Origin
from kcoord.artifacts.object import write_object
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files.atomic import LAYOUT
from kcoord.keys import CacheKey

KEY = CacheKey.of("test", "kernel", source="x")
OTHER_KEY = CacheKey.of("test", "kernel", source="y")
FILES = {"a.cubin": bytes(range(256)) * 20, "b/c.json": b'{"x": 1}', "empty": b"", "n\u00e4me \u7de8": b"text"}


def manifest_of(files: dict[str, bytes] = FILES, key: CacheKey = KEY, host: str = "host") -> Manifest:
    """The manifest of an artifact of `files` that `host` compiled in 2 seconds."""
    entries = tuple(FileEntry(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in sorted(files.items()))
    return Manifest(key, entries, 2.0, Origin(host, 1, 0, "cuda:90#0", 1.7e9))


def quarantined(store: Store) -> list[Path]:
    directory = store.root / LAYOUT / "quarantine"
    return list(directory.iterdir()) if directory.exists() else []


def staged(store: Store) -> list[Path]:
    return list((store.root / LAYOUT / "staging").iterdir())


def _flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _replace(path: Path) -> None:
    path.unlink()
    path.mkdir()


def object_of(manifest: Manifest, files: dict[str, bytes]) -> bytes:
    """The bytes of an artifact's object, unsigned."""
    file = io.BytesIO()
    write_object(file, manifest, manifest.encode(), files)
    return file.getvalue()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a truncated payload": lambda path: os.truncate(path, path.stat().st_size - 20),
    "a longer payload": _append,
    "a flipped bit of the payload": lambda path: _flip(path, -100),
    "a flipped bit of the manifest": lambda path: _flip(path, 60),
    "a flipped bit of the header": lambda path: _flip(path, 20),
    "a truncated manifest": lambda path: os.truncate(path, 40),
    "an empty file": lambda path: os.truncate(path, 0),
    "a directory": _replace,
    "another key's artifact": lambda path: path.write_bytes(object_of(manifest_of(key=OTHER_KEY), FILES)),
    "other files": lambda path: path.write_bytes(object_of(manifest_of(), dict.fromkeys(FILES, b""))),
}
"""Faults of a disk or a writer, done to an artifact's object."""


class StoreConformance:
    """``make_store(root)`` returns a store below `root`, which need not exist, and opens nothing."""

    make_store: Callable[[Path], Store]

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        made = self.make_store(tmp_path / "store")
        made.open()
        return made

    def test_a_store_keeps_its_uuid(self, tmp_path: Path) -> None:
        first = self.make_store(tmp_path / "store").open()
        again = self.make_store(tmp_path / "store")
        assert again.open() == first
        assert again.opened
        assert self.make_store(tmp_path / "another").open() != first
        assert staged(again) == []

    def test_a_store_below_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match="name a directory"):
            self.make_store(tmp_path / "file" / "store").open()

    def test_a_check_tells_a_store_that_takes_artifacts_and_makes_none(self, store: Store, tmp_path: Path) -> None:
        store.check()
        with pytest.raises(StoreError):
            self.make_store(tmp_path / "none").check()
        assert not (tmp_path / "none").exists()

    def test_what_is_published_is_fetched_with_every_byte(self, store: Store) -> None:
        announced = store.publish(manifest_of(), FILES)
        fetched = self.make_store(store.root).fetch(KEY.digest, announced)  # as on another node
        assert fetched is not None
        manifest, contents, stated = fetched
        assert contents == FILES
        assert stated == announced
        assert manifest.files == manifest_of().files
        assert manifest.compile_seconds == 2.0
        assert store.fetch(KEY.digest) == fetched
        assert staged(store) == []

    def test_an_artifact_is_one_file_which_makes_it_in_another_store(self, store: Store, tmp_path: Path) -> None:
        announced = store.publish(manifest_of(), FILES)
        found = store.object(KEY.digest)
        assert found is not None
        assert store.home(KEY.digest).read_bytes() == b"".join(found.pieces())
        assert store.home(KEY.digest).stat().st_nlink == 1
        assert store.manifest_bytes(KEY.digest) == found.encoded
        other = self.make_store(tmp_path / "other")
        other.open()
        assert other.object(KEY.digest) is None
        assert other.publish_object(found) == announced
        assert other.fetch(KEY.digest, announced) == store.fetch(KEY.digest, announced)

    def test_what_is_not_there_is_a_miss(self, store: Store) -> None:
        assert store.fetch(KEY.digest) is None
        assert store.fetch(KEY.digest, "0" * 64) is None
        store.publish(manifest_of(key=OTHER_KEY), FILES)
        assert store.fetch(KEY.digest) is None
        assert store.object(KEY.digest) is None
        assert store.manifest_bytes(KEY.digest) is None

    def test_the_second_publisher_announces_the_winners_manifest(self, store: Store) -> None:
        first = store.publish(manifest_of(host="one"), FILES)
        second = store.publish(manifest_of({"other": b"bytes"}, host="two"), {"other": b"bytes"})
        assert second == first
        fetched = store.fetch(KEY.digest, second)
        assert fetched is not None
        assert fetched[0].origin.host == "one"
        assert staged(store) == []
        assert quarantined(store) == []

    def test_of_many_publishers_at_once_one_wins_and_all_announce_it(self, store: Store) -> None:
        ready = threading.Barrier(8)

        def publish(number: int) -> str:
            mine = self.make_store(store.root)
            ready.wait(20)
            return mine.publish(manifest_of(host=f"host {number}"), FILES)

        with ThreadPoolExecutor(8) as pool:
            (announced,) = set(pool.map(publish, range(8)))
        assert store.fetch(KEY.digest, announced) is not None
        assert (staged(store), quarantined(store)) == ([], [])

    def test_all_artifacts_are_listed_and_damaged_manifests_left_out(self, store: Store) -> None:
        keys = [CacheKey.of("test", f"k{n}") for n in range(5)]
        assert (list(store.digests()), store.manifests()) == ([], [])
        for key in keys:
            store.publish(manifest_of(key=key), FILES)
        store.home(keys[3].digest).write_bytes(b"junk")
        (store.root / LAYOUT / "objects" / "zz").touch()
        assert sorted(store.digests()) == sorted(key.digest for key in keys)
        assert sorted(manifest.key.name for manifest in store.manifests()) == ["k0", "k1", "k2", "k4"]

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_a_reader_refuses_a_damaged_artifact_and_the_leader_quarantines_it_and_can_publish_anew(
        self, store: Store, damage: str
    ) -> None:
        announced = store.publish(manifest_of(), FILES)
        DAMAGE[damage](store.home(KEY.digest))
        with pytest.raises(ArtifactInvalid):
            store.fetch(KEY.digest, announced)
        assert quarantined(store) == []
        with pytest.raises(ArtifactInvalid):
            store.fetch(KEY.digest)
        assert len(quarantined(store)) == 1
        assert store.fetch(KEY.digest) is None
        store.publish(manifest_of(), FILES)
        fetched = store.fetch(KEY.digest)
        assert fetched is not None
        assert fetched[1] == FILES

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_publishing_over_a_damaged_artifact_replaces_it(self, store: Store, damage: str) -> None:
        store.publish(manifest_of(host="old"), FILES)
        DAMAGE[damage](store.home(KEY.digest))
        announced = store.publish(manifest_of(host="new"), FILES)
        fetched = store.fetch(KEY.digest, announced)
        assert fetched is not None
        assert fetched[0].origin.host == "new"
        assert len(quarantined(store)) == 1

    def test_another_artifact_than_the_announced_one_will_not_do_and_is_left_alone(self, store: Store) -> None:
        store.publish(manifest_of(), FILES)
        with pytest.raises(ArtifactInvalid, match="not the artifact that was announced"):
            store.fetch(KEY.digest, "0" * 64)
        assert quarantined(store) == []
        assert store.fetch(KEY.digest) is not None

    def test_a_store_that_has_vanished_is_an_error_and_no_miss(self, store: Store) -> None:
        """Its mount is gone: what is written would land on the disk below."""
        store.publish(manifest_of(), FILES)
        store.root.rename(store.root.with_name("away"))
        for use in (store.check, lambda: store.publish(manifest_of(), FILES), lambda: store.fetch(KEY.digest)):
            with pytest.raises(StoreError):
                use()
        assert not store.root.exists()
