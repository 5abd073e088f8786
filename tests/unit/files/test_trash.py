"""What is taken into the trash can be put back, and never over something newer."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcoord.files.trash import Trash


@pytest.fixture
def trash(tmp_path: Path) -> Trash:
    return Trash(tmp_path / "trash", tmp_path)


def test_it_comes_back_as_it_was_and_never_over_something_newer(trash: Trash, tmp_path: Path) -> None:
    path = tmp_path / "name"
    path.mkdir()
    (path / "inner").write_bytes(b"old")
    taken = trash.take(path)
    assert taken is not None
    assert not path.exists()
    assert trash.put_back(taken, path)
    assert (path / "inner").read_bytes() == b"old"
    taken = trash.take(path)
    assert taken is not None
    path.mkdir()
    (path / "inner").write_bytes(b"new")
    assert not trash.put_back(taken, path)
    assert (path / "inner").read_bytes() == b"new"
