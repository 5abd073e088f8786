"""Manifests: what is written is read back, and nothing else is ever accepted."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.artifacts.manifest import (
    HOME_PLACEHOLDER,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    Origin,
    check_content,
    home_token,
    portable,
)
from kcoord.errors import ArtifactInvalid
from kcoord.keys import CacheKey
from tests.support.fuzzing import fuzz

KEY = CacheKey.of("test", "kernel", source="x", env={"A": "1"}).with_details({"ptxas": "12.8"})
SHA = hashlib.sha256(b"abc").hexdigest()
MANIFEST = Manifest(
    KEY,
    (FileEntry("group.json", 3, SHA, True), FileEntry("kernel.cubin", 3, SHA), FileEntry("sub/dir/x.so", 0, SHA)),
    1.5,
    Origin("host", 42, 3, "cuda:90#0", 1.7e9),
    needs=("libc.so.6 GLIBC_2.34", "machine 62"),
)


def document() -> dict[str, Any]:
    return dict(msgpack.unpackb(MANIFEST.encode()))


def refused(changed: Any) -> str:
    with pytest.raises(ArtifactInvalid) as caught:
        Manifest.decode(msgpack.packb(changed))
    return str(caught.value)


@pytest.mark.parametrize(
    "manifest",
    [
        MANIFEST,
        replace(MANIFEST, origin=Origin()),
        replace(MANIFEST, files=()),
        replace(MANIFEST, compile_seconds=0.0),
        replace(MANIFEST, files=(FileEntry("ünï cödé \n \\ 編譯", 5, SHA),)),
        replace(MANIFEST, files=(FileEntry("..a", 5, SHA), FileEntry("a..", 5, SHA), FileEntry("a...b", 5, SHA))),
    ],
)
def test_a_manifest_survives_encoding(manifest: Manifest) -> None:
    decoded = Manifest.decode(manifest.encode())
    assert decoded.explained == manifest.key
    assert replace(decoded, key=decoded.explained, details=b"") == manifest
    assert Manifest.decode(decoded.encode()) == decoded, "details that nobody unpacked travel on"
    assert manifest.encode() == manifest.encode()


@pytest.mark.parametrize(
    "name",
    [
        "", "/", "/etc/passwd", "..", "../x", "a/../b", "a/..", ".", "./a", "a/./b", "a//b", "a/", "/a", "a\0b", "\0",
        MANIFEST_NAME, "//", "a/../../b",
    ],
)  # fmt: skip
def test_a_name_that_is_not_plain_and_relative_is_refused(name: str) -> None:
    changed = document()
    changed["files"] = [[name, 3, SHA, False]]
    assert "not a plain relative name" in refused(changed)


@pytest.mark.parametrize(
    ("what", "files"),
    [
        ("one name twice", [["a", 3, SHA, False], ["a", 3, SHA, False]]),
        ("names out of order", [["b", 3, SHA, False], ["a", 3, SHA, False]]),
        ("a name below a file", [["a", 3, SHA, False], ["a/b", 3, SHA, False]]),
        ("a name far below a file", [["a", 3, SHA, False], ["a/b/c/d", 3, SHA, False]]),
        ("a negative size", [["a", -1, SHA, False]]),
        ("a huge size", [["a", 2**62, SHA, False]]),
        ("sizes that are huge together", [[f"{n}", 16 << 30, SHA, False] for n in range(2)]),
        ("a size that is a float", [["a", 3.0, SHA, False]]),
        ("a size that is text", [["a", "3", SHA, False]]),
        ("a short hash", [["a", 3, SHA[:-1], False]]),
        ("a hash in capitals", [["a", 3, SHA.upper(), False]]),
        ("a hash of bytes", [["a", 3, SHA.encode(), False]]),
        ("a name of bytes", [[b"a", 3, SHA, False]]),
        ("a flag that is a number", [["a", 3, SHA, 1]]),
        ("too few fields", [["a", 3, SHA]]),
        ("too many fields", [["a", 3, SHA, False, 0]]),
        ("no list", 3),
        ("none", None),
        ("too many files", [[f"{n:05}", 0, SHA, False] for n in range(10_001)]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_list_of_files_that_is_not_tame_is_refused(what: str, files: Any) -> None:
    changed = document()
    changed["files"] = files
    refused(changed)


@pytest.mark.parametrize("field", ["format", "digest", "key", "files", "compile_seconds", "origin", "targets"])
def test_a_missing_field_is_refused(field: str) -> None:
    changed = document()
    del changed[field]
    refused(changed)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xff", b"\x80", b"\x91" * 5000 + b"\x00", b"\x81\x90\x00"])
def test_bytes_that_are_no_document_are_refused(data: bytes) -> None:
    with pytest.raises(ArtifactInvalid):
        Manifest.decode(data)


def test_a_manifest_of_another_key_is_refused() -> None:
    changed = document()
    changed["key"] = CacheKey.of("test", "kernel", source="y").to_wire()
    assert "digest" in refused(changed)


def test_a_manifest_with_something_behind_it_is_refused() -> None:
    with pytest.raises(ArtifactInvalid):
        Manifest.decode(MANIFEST.encode() + b"\0")


def test_a_manifest_that_is_too_large_is_refused_unread() -> None:
    with pytest.raises(ArtifactInvalid, match="too many"):
        Manifest.decode(b"\0" * ((4 << 20) + 1))


def test_a_manifest_that_is_nested_without_end_is_refused() -> None:
    wire: list[Any] = ["n", "d", "t", []]
    for _ in range(300):
        wire = ["n", "d", "t", [wire]]
    changed = document()
    changed["key"]["factors"] = [wire]
    refused(changed)


@pytest.mark.parametrize(
    "key",
    [CacheKey.of("test", "kernel\udcff"), CacheKey.of("test", "kernel").with_details({"flag\udcff": "x"})],
    ids=["kernel", "detail"],
)
def test_a_name_that_is_not_utf8_makes_no_manifest(key: CacheKey) -> None:
    with pytest.raises(ArtifactInvalid, match="a name in its manifest is not UTF-8"):
        replace(MANIFEST, key=key).encode()


@pytest.mark.serial
def test_ten_thousand_long_names_are_judged_in_seconds() -> None:
    changed = document()
    changed["files"] = [[f"{'d/' * 30}{n:05}", 0, SHA, False] for n in range(9_000)]
    began = time.monotonic()
    Manifest.decode(msgpack.packb(changed))
    assert time.monotonic() - began < 5.0


def test_every_truncation_is_refused() -> None:
    encoded = MANIFEST.encode()
    for length in range(len(encoded)):
        with pytest.raises(ArtifactInvalid):
            Manifest.decode(encoded[:length])


@given(st.binary(max_size=300))
@fuzz(300)
def test_random_bytes_are_refused_and_raise_nothing_else(data: bytes) -> None:
    with pytest.raises(ArtifactInvalid):
        Manifest.decode(data)


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(sorted(document())), _JSON)
@fuzz(300)
def test_a_field_replaced_by_anything_is_refused_or_harmless(field: str, value: Any) -> None:
    changed = document()
    changed[field] = value
    try:
        manifest = Manifest.decode(msgpack.packb(changed))
    except ArtifactInvalid:
        return
    assert manifest.key.digest == KEY.digest
    assert Manifest.decode(manifest.encode()) == manifest or manifest.origin.created != manifest.origin.created


@given(st.integers(0), st.integers(1, 255))
@fuzz(400)
def test_a_flipped_byte_is_refused_or_leaves_a_tame_manifest(position: int, mask: int) -> None:
    """A manifest alone cannot tell that its file's hash was altered; the files' content then can."""
    encoded = bytearray(MANIFEST.encode())
    encoded[position % len(encoded)] ^= mask
    try:
        manifest = Manifest.decode(bytes(encoded))
    except ArtifactInvalid:
        return
    assert manifest.key.digest == KEY.digest
    for entry in manifest.files:
        assert not entry.name.startswith("/")
        assert ".." not in entry.name.split("/")


def test_content_that_is_not_what_was_stated_is_refused() -> None:
    entry = FileEntry("a", 3, SHA)
    check_content(entry, b"abc")
    for content in (b"", b"ab", b"abcd", b"abd"):
        with pytest.raises(ArtifactInvalid, match="a "):
            check_content(entry, content)


def test_a_relocatable_file_travels_without_its_directory() -> None:
    from pathlib import Path

    entry = FileEntry("g.json", 0, SHA, True)
    for home in (Path("/a/b"), Path('/quo"te/back\\slash'), Path("/ünï/cöde")):
        settled = b'{"x": "' + HOME_PLACEHOLDER.replace(HOME_PLACEHOLDER, home_token(home)) + b'/k"}'
        assert portable(entry, settled, home) == b'{"x": "' + HOME_PLACEHOLDER + b'/k"}'
        assert portable(entry._replace(relocatable=False), settled, home) == settled
