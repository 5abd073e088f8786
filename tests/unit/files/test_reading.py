"""Reading what others may write: plain files, whole and bounded; msgpack of few values."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.errors import ArtifactInvalid
from kcoord.files.reading import read_plain, unpack


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


_texts = st.text(max_size=300) | st.binary(max_size=70_000)
_numbers = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False)
_extensions = st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=300))
_plain = st.recursive(
    _texts | _numbers | _extensions,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
)


def count(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    return 1 + sum(1 + count(each) for each in value.values()) if isinstance(value, dict) else 1


@given(_plain)
def test_a_document_of_so_many_values_is_unpacked_and_one_more_is_refused(value: Any) -> None:
    content, values = msgpack.packb(value), count(value)
    assert unpack(content, values) == value
    if len(content) > values - 1 > 0:
        with pytest.raises(ValueError, match="values"):
            unpack(content, values - 1)


@pytest.mark.parametrize("head", [b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_a_count_that_is_only_stated_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError, match=r"values|msgpack"):
        unpack(head + b"\x00" * 200, 100)


@given(st.binary(max_size=300))
def test_bytes_of_no_format_raise_value_error_or_are_a_document(content: bytes) -> None:
    with contextlib.suppress(ValueError, TypeError):  # TypeError: a map's key that cannot be one
        unpack(content, 100, strict_map_key=False)


def test_a_deep_document_raises_value_error() -> None:
    with pytest.raises(ValueError, match="msgpack"):
        unpack(b"\x91" * 100_000 + b"\x00", 1_000_000)
