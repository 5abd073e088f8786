"""Reads of a store's artifacts: in order, several at a time, none twice that fits, and nothing that is too large."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcoord.artifacts.store import Store
from kcoord.transfer.reads import Reads
from tests.support.artifacts import publish


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.open()
    return store


@pytest.mark.parametrize("abreast", [1, 4])
def test_they_come_in_order_and_what_is_missing_damaged_or_too_large_says_why(store: Store, abreast: int) -> None:
    digests = [publish(store, f"k{n}") for n in range(20)]
    store.home(digests[3]).write_bytes(b"torn")
    large = publish(store, "large" * 1000)
    asked = [*digests, "f" * 64, large]
    found = list(Reads(store, abreast=abreast, largest=1000).of(asked, "gone"))
    assert [digest for digest, _, _ in found] == asked
    assert [digest for digest, files, _ in found if files is None] == [digests[3], "f" * 64, large]
    assert [why for _, files, why in found if files is None][1] == "gone"
    assert "5000 bytes are more than 1000" in found[-1][2]
    assert all(files == store.object(digest) for digest, files, _ in found if files is not None)


def test_what_fits_into_memory_is_read_once_more_from_there_and_the_rest_from_the_store(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [publish(store, f"k{n}") for n in range(3)]
    sizes = [found.size for digest in digests if (found := store.object(digest))]
    reads = Reads(store, room=sizes[0] + sizes[1])
    first = list(reads.of(digests, "gone"))
    again: list[str] = []
    object_of = store.object
    monkeypatch.setattr(store, "object", lambda digest, largest: again.append(digest) or object_of(digest, largest))
    assert [files for _, files, _ in reads.of(digests, "gone")] == [files for _, files, _ in first]
    assert again == digests[2:]
