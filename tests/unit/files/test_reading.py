"""Reading files that others may write to: whole, bounded, and no other kind of file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kcoord.errors import ArtifactInvalid
from kcoord.files.reading import read_plain


def test_a_file_is_read_whole_though_each_read_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)))
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, count: read(descriptor, min(count, 100)))
    assert read_plain(tmp_path / "file", 256) == bytes(range(256))


def test_a_file_that_shrinks_meanwhile_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"content")
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, count: b"" if count < 8 else read(descriptor, 3))
    assert read_plain(tmp_path / "file", 7) == b"con"


def test_nothing_is_read_of_a_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_plain(tmp_path / "file", 7) == b"content"
    monkeypatch.setattr(os, "read", lambda descriptor, count: pytest.fail("it is read"))
    with pytest.raises(ArtifactInvalid, match="7 bytes, more than the 6"):
        read_plain(tmp_path / "file", 6)


def test_a_file_that_is_read_afresh_is_dropped_from_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    advised: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, start, size, advice: advised.append(advice))
    assert read_plain(tmp_path / "file", 7) == b"content"
    assert advised == []
    assert read_plain(tmp_path / "file", 7, afresh=True) == b"content"
    assert advised == [os.POSIX_FADV_DONTNEED]


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "device"])
def test_another_kind_of_file_is_refused_and_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "link":
        (tmp_path / "target").write_bytes(b"content")
        path.symlink_to("target")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path = Path("/dev/zero")
    with pytest.raises(ArtifactInvalid, match="no plain file"):
        read_plain(path, 100)
