"""What is taken into the trash can be put back, and never over something newer."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcoord.files.trash import Trash


@pytest.fixture
def trash(tmp_path: Path) -> Trash:
    return Trash(tmp_path / "trash", tmp_path)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_it_comes_back_as_it_was(trash: Trash, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "name"
    if kind == "directory":
        path.mkdir()
    (path / "inner" if kind == "directory" else path).write_bytes(b"old")
    taken = trash.take(path)
    assert taken is not None
    assert not path.exists()
    assert trash.put_back(taken, path)
    assert (path / "inner" if kind == "directory" else path).read_bytes() == b"old"
    assert not taken.exists()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_it_replaces_nothing_that_was_published_meanwhile(trash: Trash, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "name"
    for content in (b"old", b"new"):
        if kind == "directory":
            path.mkdir()
        (path / "inner" if kind == "directory" else path).write_bytes(content)
        if content == b"old":
            taken = trash.take(path)
            assert taken is not None
    assert not trash.put_back(taken, path)
    assert (path / "inner" if kind == "directory" else path).read_bytes() == b"new"
