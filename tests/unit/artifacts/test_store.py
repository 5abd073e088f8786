"""The store: what leaves one node arrives whole on another, or does not arrive."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgpack
import pytest
import zstandard

from kcoord.artifacts import local
from kcoord.artifacts import store as store_module
from kcoord.artifacts.manifest import HOME_PLACEHOLDER, Origin
from kcoord.artifacts.store import Store, manifest_digest
from kcoord.artifacts.store_root import MARKER
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files import beneath
from kcoord.files.reading import open_plain
from kcoord.files.rename import refresh_names
from kcoord.keys import CacheKey
from kcoord.testing.stores import FILES, KEY, OTHER_KEY, StoreConformance, manifest_of, quarantined, staged
from tests.support.objects import parts_of, payload_of, unpack

_ROOT = Path(__file__).parents[3]


@pytest.fixture
def opened(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.open()
    return made


class TestStore(StoreConformance):
    make_store = Store


# --- opening ---


def test_ten_processes_that_open_a_new_store_at_once_agree_on_its_uuid(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from kcoord.artifacts.store import Store\n"
        "print('here', flush=True); sys.stdin.readline(); print(Store(Path(sys.argv[1])).open())"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "deep" / "store")],
            env={**os.environ, "PYTHONPATH": str(_ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(10)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
        told = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            output, errors = process.communicate(timeout=60)
            assert process.returncode == 0, errors
            told.append(output.strip())
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert len(set(told)) == 1
    assert len(told[0]) == 32
    assert staged(Store(tmp_path / "deep" / "store")) == []


@pytest.mark.parametrize(
    "marker",
    [
        b"", b"junk", b"\xc1", msgpack.packb({"format": 2, "uuid": "u"}), msgpack.packb({"uuid": "u"}), msgpack.packb([1]),
        msgpack.packb({"format": 1}), msgpack.packb({"format": 1, "uuid": 7}),
    ],
)  # fmt: skip
def test_a_directory_that_is_another_formats_store_is_refused_with_a_remedy(tmp_path: Path, marker: bytes) -> None:
    (tmp_path / MARKER).write_bytes(marker)
    with pytest.raises(StoreError, match=r"point KCOORD_STORE elsewhere|a new directory") as caught:
        Store(tmp_path).open()
    assert "\n" not in str(caught.value)


# --- the way there and back ---


def test_an_artifact_is_one_file_which_the_umask_lets_others_read(opened: Store) -> None:
    before = os.umask(0o027)
    try:
        opened.publish(manifest_of(), FILES)
    finally:
        os.umask(before)
    found = opened.home(KEY.digest).stat()
    assert (stat.S_ISREG(found.st_mode), stat.S_IMODE(found.st_mode), found.st_nlink) == (True, 0o640, 1)
    assert opened.home(KEY.digest) == opened.root / "v2" / "objects" / KEY.digest[:2] / KEY.digest


def test_the_same_files_make_the_same_payload() -> None:
    other = dict(reversed(FILES.items()))
    assert payload_of(manifest_of(), FILES) == payload_of(manifest_of(host="other"), other)


def test_a_group_file_travels_through_the_store_to_another_home(opened: Store, tmp_path: Path) -> None:
    group = json.dumps({"child_paths": {"k.cubin": f"{HOME_PLACEHOLDER.decode()}/k.cubin"}}).encode()
    there = tmp_path / "node-a" / KEY.digest
    staging = local.new_staging(there)
    (staging / "k.cubin").write_bytes(b"code")
    (staging / "group.json").write_bytes(group)
    sent = local.publish_local(staging, there, KEY, 1.0, Origin())
    opened.publish(sent.manifest, local.read_contents(sent))
    fetched = opened.fetch(KEY.digest)
    assert fetched is not None
    here = local.install(fetched[0], fetched[1], tmp_path / "node-b" / "elsewhere")
    paths = json.loads((here.path / "group.json").read_bytes())["child_paths"]
    assert paths == {"k.cubin": str(tmp_path / "node-b" / "elsewhere" / "k.cubin")}
    assert Path(paths["k.cubin"]).read_bytes() == b"code"
    assert str(tmp_path).encode() not in fetched[1]["group.json"], "no path of the first node travels"


def test_what_vanishes_on_an_nfs_server_while_its_manifest_is_read_is_not_there(
    opened: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(2):
        opened.publish(manifest_of(key=CacheKey.of("test", f"k{n}")), FILES)
    goes = opened.home(CacheKey.of("test", "k0").digest)

    def reading(path: Path, most: int) -> BinaryIO:
        if path == goes:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return open_plain(path, most)

    monkeypatch.setattr(store_module, "open_plain", reading)
    assert opened.manifest_bytes(goes.name) is None
    assert [m.key.name for m in opened.manifests()] == ["k1"]


# --- damage ---


@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_of_another_size_than_its_header_states_has_no_manifest(opened: Store, more: int) -> None:
    opened.publish(manifest_of(), FILES)
    path = opened.home(KEY.digest)
    os.truncate(path, path.stat().st_size + more)
    assert opened.readable_manifest(KEY.digest) is None
    with pytest.raises(ArtifactInvalid, match="are not those that its header states"):
        opened.stated(KEY.digest)


def test_a_disk_that_cannot_be_read_is_a_fault_of_the_store_and_no_miss(
    opened: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.publish(manifest_of(), FILES)

    def fails(path: Path, most: int, *, afresh: bool = False) -> BinaryIO:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr("kcoord.artifacts.store.open_plain", fails)
    with pytest.raises(StoreError, match="input/output error"):
        opened.fetch(KEY.digest)
    with pytest.raises(StoreError, match="input/output error"):
        opened.object(KEY.digest)
    monkeypatch.undo()
    assert opened.fetch(KEY.digest) is not None
    assert quarantined(opened) == []


def test_a_winner_that_is_read_differently_each_time_is_a_fault_of_this_node(
    opened: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.publish(manifest_of(), FILES)
    reads: list[Path] = []

    def wrong(path: Path, most: int, *, afresh: bool = False) -> BinaryIO:
        reads.append(path)
        return _Altered(path, len(reads))

    monkeypatch.setattr("kcoord.artifacts.store.open_plain", wrong)
    with pytest.raises(StoreError, match="differently each time"):
        opened.publish(manifest_of(host="another"), FILES)
    assert quarantined(opened) == staged(opened) == []


def test_a_lookup_opens_the_directories_whose_names_an_nfs_client_remembers(
    opened: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Path] = []

    def noted(directory: Path) -> None:
        looked.append(directory)
        refresh_names(directory)

    monkeypatch.setattr("kcoord.artifacts.store.refresh_names", noted)
    bucket = opened.home(KEY.digest).parent
    assert opened.fetch(KEY.digest) is None
    assert looked == [bucket, bucket.parent, bucket]
    looked.clear()
    opened.publish(manifest_of(), FILES)
    assert opened.fetch(KEY.digest) is not None
    assert looked == [], "what is found at once is not looked for again"
    other = KEY.digest[:2] + OTHER_KEY.digest[2:]
    assert opened.fetch(other) is None
    assert looked == [bucket]


def test_to_open_a_store_that_is_there_writes_nothing(opened: Store) -> None:
    places = [opened.root, *(place for place in opened.root.rglob("*") if place.is_dir())]
    for place in places:
        os.utime(place, (1, 1))
    assert Store(opened.root).open() == opened.uuid
    assert {place.stat().st_mtime for place in places} == {1.0}


def test_a_removal_while_it_is_read_is_a_miss(opened: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """ESTALE comes from NFS clients only, so it is made up here."""
    large = {"a": os.urandom(3 << 20)}
    opened.publish(manifest_of(large), large)
    for reads in range(2):

        def stale(path: Path, most: int, *, afresh: bool = False, reads: int = reads) -> BinaryIO:
            return _Stale(path, reads)

        with monkeypatch.context() as context:
            context.setattr(store_module, "open_plain", stale)
            assert opened.fetch(KEY.digest) is None
    assert quarantined(opened) == []


class _Altered(io.FileIO):
    """A file whose last byte is read as `last`."""

    def __init__(self, path: Path, last: int) -> None:
        super().__init__(path)
        self._last = last

    def read(self, size: int = -1, /) -> bytes:
        content = super().read(size) or b""
        return content[:-1] + bytes([self._last]) if self.tell() == os.fstat(self.fileno()).st_size else content


class _Stale(io.FileIO):
    """A file that is removed on its NFS server after so many reads."""

    def __init__(self, path: Path, reads: int) -> None:
        super().__init__(path)
        self._reads = reads

    def read(self, size: int = -1, /) -> bytes:
        self._reads -= 1
        if self._reads < 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.name))
        return super().read(size)


# --- payloads that lie ---


def _compressed(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(plain)


_TWO = {"a": b"abc", "b": b"de"}

_LIES: dict[str, bytes] = {
    "nothing": _compressed(b""),
    "other content": _compressed(b"abdde"),
    "shorter content": _compressed(b"abcd"),
    "longer content": _compressed(b"abcdef"),
    "files in another order": _compressed(b"deabc"),
    "a second frame": _compressed(b"abcde") + _compressed(b"x"),
    "a byte after the frame": _compressed(b"abcde") + b"xxxxx",
    "no zstd": b"x" * 200,
    "truncated zstd": _compressed(os.urandom(3000))[:100],
    "a decompression bomb": _compressed(b"abcde" + b"\0" * (64 << 20)),
    "a bomb from the first byte": _compressed(b"\0" * (64 << 20)),
}


@pytest.mark.parametrize("lie", _LIES)
def test_a_payload_that_is_not_what_its_manifest_states_is_refused(lie: str) -> None:
    payload = _LIES[lie]
    manifest = manifest_of(_TWO)
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactInvalid):
            unpack(manifest, payload)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20, "memory stays within what the manifest states"
    finally:
        tracemalloc.stop()


def test_a_flipped_bit_anywhere_in_a_stored_payload_is_refused_or_changes_no_file() -> None:
    """zstd says the same in several ways: as the size of its window, or where the zeros are that it repeats."""
    manifest = manifest_of(_TWO)
    payload = payload_of(manifest, _TWO)
    same = 0
    for position in range(len(payload) * 8):
        damaged = bytearray(payload)
        damaged[position // 8] ^= 1 << position % 8
        with suppress(ArtifactInvalid):
            assert unpack(manifest, bytes(damaged)) == _TWO
            same += 1
    assert same < len(payload) // 2, "of eight times as many bits"


# --- what a lookup does to a file server ---


def test_what_is_announced_is_the_hash_of_the_manifest_in_the_store(opened: Store) -> None:
    announced = opened.publish(manifest_of(), FILES)
    assert manifest_digest(parts_of(opened.home(KEY.digest))[0]) == announced


def test_the_file_is_flushed_to_disk_before_its_name_is_there_and_the_name_after(
    opened: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, link = os.fsync, beneath.link

    def noted_fsync(descriptor: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink()}")
        fsync(descriptor)

    def noted_link(source: Path, target: Path, root: Path | None) -> None:
        events.append("link")
        link(source, target, root)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(beneath, "link", noted_link)
    opened.publish(manifest_of(), FILES)
    assert [event.partition("/staging/")[0] for event in events] == [
        f"sync {opened.root / 'v2'}",
        "link",
        f"sync {opened.home(KEY.digest).parent}",
    ]
