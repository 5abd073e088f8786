"""Packs: one file that serves as the store's artifacts do, and nothing of a damaged or forged one is ever loaded."""

from __future__ import annotations

import functools
import os
import shutil
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.artifacts.signing import BUNDLE, Trust, split
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.keys import CacheKey
from kcoord.profiles.automatic import automatic_name
from kcoord.profiles.packs import newest_pack, pack_name, packs_directory, packs_of, signer_of
from kcoord.profiles.parts import forget_superfluous, save_part
from kcoord.testing.stores import FILES, manifest_of, staged
from kcoord.transfer import pack as pack_module
from kcoord.transfer.bundle import gather, head_of
from kcoord.transfer.bundle_index import Blob, Index, Packed
from kcoord.transfer.pack import Pack, PackUnused, look_at_pack, read_pack, write_pack
from tests.support.artifacts import older
from tests.support.fuzzing import fuzz, mutants
from tests.support.profiles import recipe
from tests.support.signing import OURS, THEIRS, opened, trust, unsigned

KEYS = [CacheKey.of("test", f"kernel {n}") for n in range(4)]
DIGESTS = sorted(key.digest for key in KEYS)


def filled(root: Path, *keys: str, policy: str = "require") -> Store:
    store = opened(root, *keys, policy=policy)
    for key in KEYS:
        store.publish(manifest_of(key=key), FILES)
    return store


def packed(store: Store, digests: list[str] = DIGESTS, profile: str = "job") -> Path:
    for earlier in packs_of(store.root, profile):
        older(earlier, 1.0)  # than the clock's step
    write_pack(store, profile, digests)
    (path,) = packs_of(store.root, profile)
    return path


@contextmanager
def read(store: Store, profile: str = "job") -> Iterator[Pack]:
    found = read_pack(store, profile, store.root.parent)
    assert found is not None
    with closing(found) as pack:
        yield pack


def refused(store: Store) -> str:
    with pytest.raises(PackUnused) as caught:
        read_pack(store, "job", store.root.parent)
    return str(caught.value)


# --- one file for many ---


def test_an_artifact_from_the_pack_is_the_stores_to_the_last_byte(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", OURS)
    packed(store)
    with read(store) as pack:
        assert pack.digests == set(DIGESTS)
        for digest in DIGESTS:
            assert pack.fetch(digest) == (found := store.fetch(digest))
            assert found is not None
            assert pack.announced(digest) == found[2]
            assert pack.stated(digest) == store.stated(digest)
            assert pack.fetch(digest, found[2]) == found
            assert pack.fetch(digest, "another manifest") is None
        assert pack.fetch("f" * 64) is None
        assert pack.stated("f" * 64) is None


def test_a_pack_is_read_once_and_serves_when_the_store_is_gone(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    packed(store)
    with read(store) as pack:
        shutil.rmtree(store.root)
        assert all(pack.fetch(digest) for digest in DIGESTS)


def test_a_copy_has_no_name_and_leaves_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    packed(store)
    with read(store) as pack:
        assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert pack.fetch(DIGESTS[0]) is None, "closed: its artifacts are looked up"
    assert pack.stated(DIGESTS[0]) is None


def test_equal_artifacts_make_one_file_whoever_writes_it_and_when(tmp_path: Path) -> None:
    one = filled(tmp_path / "one", OURS)
    shutil.copytree(one.root, tmp_path / "two")
    two = Store(tmp_path / "two", trust(OURS))
    first, second = packed(one), packed(two, DIGESTS[::-1] * 2)
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    assert packed(one) == first


def test_agents_that_write_at_once_leave_one_whole_pack(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", OURS)
    barrier = threading.Barrier(4)

    def write() -> None:
        barrier.wait()
        write_pack(Store(store.root, store.trust), "job", DIGESTS)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(packs_of(store.root, "job")) == 1
    assert staged(store) == []
    with read(store) as pack:
        assert all(pack.fetch(digest) for digest in DIGESTS)


def test_of_two_writers_at_once_one_pack_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, barrier = filled(tmp_path / "store"), threading.Barrier(2)

    def listed(root: Path, profile: str) -> list[Path]:
        barrier.wait(30)
        found = packs_of(root, profile)
        barrier.wait(30)
        return found

    monkeypatch.setattr(pack_module, "packs_of", listed)
    threads = [threading.Thread(target=write_pack, args=(store, "job", part)) for part in (DIGESTS[:2], DIGESTS[2:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(packs_of(store.root, "job")) == 1


def test_a_new_pack_takes_the_place_of_the_old_which_its_readers_keep(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    old = packed(store, DIGESTS[:2])
    with read(store) as pack:
        new = packed(store)
        assert new != old
        assert packs_of(store.root, "job") == [new]
        assert [path.name.partition("-")[0] for path in (store.root / "v2" / "trash").iterdir()] == [old.name]
        assert all(pack.fetch(digest) for digest in DIGESTS[:2])
    assert look_at_pack(store, new) == set(DIGESTS)


def test_of_two_packs_the_newest_counts(tmp_path: Path) -> None:
    """A writer was killed before it moved the old one."""
    store = filled(tmp_path / "store")
    old = packed(store, DIGESTS[:2])
    content = old.read_bytes()
    new = packed(store)
    old.write_bytes(content)
    older(old)
    assert packs_of(store.root, "job") == [new, old]


def test_what_is_missing_torn_or_too_large_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "store")
    store.home(DIGESTS[1]).write_bytes(b"torn")
    large = CacheKey.of("test", "large")
    noise = {"noise": os.urandom(40_000)}
    store.publish(manifest_of(noise, large), noise)
    monkeypatch.setattr(pack_module, "LARGEST_PACKED", 30_000)
    assert write_pack(store, "job", [*DIGESTS, large.digest, "f" * 64]) == {DIGESTS[0], *DIGESTS[2:]}


@pytest.mark.parametrize(("limit", "value"), [("MOST_PACKED", 2), ("LARGEST_PACK", 3000)])
def test_a_full_pack_holds_what_was_asked_for_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    store = filled(tmp_path / "store")
    monkeypatch.setattr(pack_module, limit, value)
    order = [DIGESTS[2], DIGESTS[0], DIGESTS[3], DIGESTS[1]]
    held = write_pack(store, "job", order)
    assert held == set(order[: len(held)])
    assert 0 < len(held) < 4
    assert packed(store, order).stat().st_size <= 3000


def test_what_an_earlier_pack_has_is_not_read_from_the_store_unless_its_copy_is_damaged(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    path = packed(store)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # of the last artifact
    with read(store) as earlier:
        store.home(DIGESTS[0]).unlink()
        assert write_pack(store, "job", DIGESTS, earlier=earlier) == set(DIGESTS)
        store.home(DIGESTS[-1]).unlink()
        assert write_pack(store, "job", DIGESTS, earlier=earlier) == set(DIGESTS[:-1])


def test_a_pack_that_is_wanted_soon_holds_what_was_read_until_then_and_loses_nothing(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    held = write_pack(store, "job", DIGESTS[1:], within=0.0)
    assert held == {DIGESTS[1]}, "each makes progress"
    with read(store) as pack:
        assert pack.digests == held
        assert write_pack(store, "job", DIGESTS, earlier=pack, within=0.0) == {*DIGESTS[:2]}
    packed(store, DIGESTS[1:])
    with read(store) as pack:
        assert write_pack(store, "job", DIGESTS, earlier=pack, within=0.0) == set(DIGESTS), "no cut in what is here"


def test_a_job_without_a_name_takes_the_pack_of_the_nearest(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    earlier, ours = automatic_name("train", 8, b"an earlier edit"), automatic_name("train", 8, b"now")
    path = packed(store, profile=earlier)
    assert newest_pack(store.root, ours) == path
    assert newest_pack(store.root, automatic_name("other", 8)) is None
    assert newest_pack(store.root, "train") is None


def test_a_directory_without_a_pack_does_not_hide_the_nearest(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    earlier, later, ours = (automatic_name("train", 8, content) for content in (b"1", b"2", b"3"))
    path = packed(store, profile=earlier)
    packs_directory(store.root, later).mkdir()
    packs_directory(store.root, ours).mkdir()
    assert newest_pack(store.root, ours) == path


def test_the_pack_of_a_forgotten_profile_is_forgotten_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "store")
    names = [automatic_name("train", 8, str(n).encode()) for n in range(3)]
    for age, name in enumerate([*names, "named"]):
        save_part(store.root / "v2" / "profiles" / name, [recipe(1)])
        older(store.root / "v2" / "profiles" / name, 1000.0 * age)
        packed(store, profile=name)
    monkeypatch.setattr("kcoord.profiles.automatic.KEPT", 2)
    forget_superfluous(store.root / "v2" / "profiles")
    assert [bool(packs_of(store.root, name)) for name in [*names, "named"]] == [True, True, False, True]


@pytest.mark.parametrize("linked", ["profiles", "packs"])
def test_nothing_is_forgotten_through_a_link_in_a_stores_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: str
) -> None:
    store = filled(tmp_path / "store")
    monkeypatch.setattr("kcoord.profiles.automatic.KEPT", 1)
    theirs = [tmp_path / "theirs" / automatic_name("train", ranks) for ranks in range(3)]
    for directory in theirs:
        directory.mkdir(parents=True)
        (store.root / "v2" / "profiles" / directory.name).mkdir(parents=True)
    if linked == "profiles":
        shutil.rmtree(store.root / "v2" / "profiles")
    (store.root / "v2" / linked).symlink_to(tmp_path / "theirs")
    for root in ("profiles", "packs"):
        forget_superfluous(store.root / "v2" / root)
    assert all(directory.exists() for directory in theirs)


def test_of_profiles_without_recipes_the_latest_packs_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "store")
    monkeypatch.setattr("kcoord.profiles.automatic.KEPT", 2)
    names = [automatic_name("train", 8, str(n).encode()) for n in range(3)]
    packed(store, profile="named")
    for name in names:
        for earlier in (store.root / "v2" / "packs").iterdir():
            older(earlier, 1000.0)
        packed(store, profile=name)
    assert [bool(packs_of(store.root, name)) for name in [*names, "named"]] == [False, True, True, True]


def test_a_store_that_is_not_mounted_gets_no_pack(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    shutil.rmtree(store.root / "v2")
    with pytest.raises(StoreError):
        write_pack(store, "job", [])
    assert [path.name for path in store.root.iterdir()] == ["kcoord-store.msgpack"]


# --- damaged, forged, unsigned ---


def served(store: Store) -> dict[str, bool]:
    """Whether the pack served each artifact. It must be the right one, and else nothing but a miss."""
    found = read_pack(store, "job", store.root.parent)
    assert found is not None
    with closing(found) as pack:
        result = {}
        for digest in DIGESTS:
            try:
                artifact = pack.fetch(digest)
            except ArtifactInvalid:
                artifact = None
                assert digest not in pack.digests, "it is not tried again"
            if artifact is not None:
                assert artifact == store.fetch(digest)
            result[digest] = artifact is not None
        return result


@given(st.data())
@fuzz(120)
@pytest.mark.parametrize("keys", [(), (OURS,)])
def test_a_pack_that_is_damaged_anywhere_serves_the_right_artifacts_or_none(
    tmp_path_factory: pytest.TempPathFactory, keys: tuple[str, ...], data: st.DataObject
) -> None:
    store, path, content = _sample(tmp_path_factory, keys)
    path.write_bytes(data.draw(mutants(content)))
    try:
        served(store)
    except PackUnused:
        return


_SAMPLES: dict[tuple[str, ...], tuple[Store, Path, bytes]] = {}


def _sample(factory: pytest.TempPathFactory, keys: tuple[str, ...]) -> tuple[Store, Path, bytes]:
    if keys not in _SAMPLES:
        store = filled(factory.mktemp("packs") / "store", *keys)
        path = packed(store)
        _SAMPLES[keys] = store, path, path.read_bytes()
    return _SAMPLES[keys]


def test_a_damaged_artifact_costs_its_own_look_up_alone(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    path = packed(store)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert served(store) == {digest: digest != DIGESTS[-1] for digest in DIGESTS}


def test_a_pack_that_was_cut_is_refused_as_a_whole(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    path = packed(store)
    os.truncate(path, path.stat().st_size - 1)
    assert "its index states" in refused(store)


@pytest.mark.parametrize(
    ("keys", "why"), [((), "not signed"), ((THEIRS,), "'other'"), ((f"main:{'c' * 64}",), "its signature")]
)
def test_where_signatures_are_required_a_pack_without_ours_is_refused_before_anything_is_read(
    tmp_path: Path, keys: tuple[str, ...], why: str
) -> None:
    """Its name claims that we have signed it."""
    store = filled(tmp_path / "store", *keys)
    path = packed(store)
    path.rename(path.with_name(pack_name(path.name[:64], "main")))
    assert why in refused(Store(store.root, trust(OURS)))


def test_a_pack_of_one_signer_leaves_the_packs_of_others(tmp_path: Path) -> None:
    ours = filled(tmp_path / "store", OURS)
    theirs, nobodys = Store(ours.root, trust(THEIRS)), Store(ours.root)
    both = Store(ours.root, trust(THEIRS, OURS, policy="warn"))
    for writer in (ours, nobodys, theirs, nobodys):
        for earlier in packs_of(ours.root, "job"):
            older(earlier, 1.0)
        write_pack(writer, "job", DIGESTS)
    with read(ours) as pack:
        assert all(pack.fetch(digest) for digest in DIGESTS)
    signers = [signer_of(path) for path in packs_of(ours.root, "job")]
    assert signers == ["", "other", "main"]
    newest = [newest_pack(ours.root, "job", reader.trust) for reader in (ours, theirs, nobodys, both)]
    assert [path and signer_of(path) for path in newest] == ["main", "other", "", "other"]
    packed_by_us = next(path for path in packs_of(ours.root, "job") if signer_of(path) == "main")
    packed_by_us.unlink()
    assert read_pack(ours, "job", tmp_path) is None, "the others are not read where our signature is required"


def test_a_signed_index_with_another_one_in_its_place_is_refused(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", OURS)
    path = packed(store)
    content = path.read_bytes()
    size = int.from_bytes(content[16:24], "big")
    plain, _ = split(content[24 : 24 + size])
    for sealed in (plain, trust(OURS).seal("manifest", plain), trust(THEIRS).seal(BUNDLE, plain)):
        path.write_bytes(content[:16] + len(sealed).to_bytes(8, "big") + sealed + content[24 + size :])
        refused(store)


def test_an_unsigned_artifact_in_a_signed_pack_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signature of the pack does not vouch for an artifact."""
    store = filled(tmp_path / "store", OURS)
    unsigned(store.home(DIGESTS[0]))
    lax = Store(store.root, Trust("off", store.trust.keys))
    assert write_pack(lax, "job", DIGESTS) == set(DIGESTS[1:]), "our own writers leave it out"
    monkeypatch.setattr(pack_module, "gather", functools.partial(gather, unsigned=True))
    packed(lax)
    with read(store) as pack:
        with pytest.raises(ArtifactInvalid, match="not signed"):
            pack.fetch(DIGESTS[0])
        assert pack.digests == set(DIGESTS[1:]), "it is not tried again"
        assert pack.fetch(DIGESTS[1])


# --- strangers' files, and full disks ---


def _symlink(path: Path) -> None:
    path.rename(aside := path.with_name("aside"))
    path.symlink_to(aside)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _huge(path: Path) -> None:
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("put", [_symlink, _pipe, _directory, _huge])
def test_what_is_no_plain_file_of_a_packs_size_is_refused_unread(tmp_path: Path, put: Callable[[Path], None]) -> None:
    store = filled(tmp_path / "store")
    put(packed(store))
    refused(store)


def test_an_index_that_is_larger_than_any_of_ours_is_not_decoded(tmp_path: Path) -> None:
    """Nobody has signed it, and the policy lets that pass."""
    store = filled(tmp_path / "store")
    index = Index(tuple(Packed(f"{n:064x}", Blob.of(b""), Blob.of(b"")) for n in range(30_000)))
    packed(store).write_bytes(head_of(index, store.trust))
    assert "huge" in refused(store)
    with pytest.raises(PackUnused):
        look_at_pack(store, packs_of(store.root, "job")[0])


def test_an_index_of_many_small_values_takes_little_memory(tmp_path: Path) -> None:
    """Each would take ten times its bytes, and more."""
    store = filled(tmp_path / "store")
    path, count = packed(store), 3_000_000
    for value in (b"\x80", b"\x90", b"\x91\x80", b"\xa0"):
        index = b"\x83\xa6format\x01\xa9artifacts\xdd" + count.to_bytes(4, "big") + value * count
        path.write_bytes(b"kcoord-bundle-1\n" + len(index).to_bytes(8, "big") + index)
        tracemalloc.start()
        try:
            with pytest.raises(PackUnused):
                look_at_pack(store, path)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 6 * len(index)


def test_a_file_in_the_place_of_the_packs_is_none(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    packs_directory(store.root, "").touch()
    assert read_pack(store, "job", tmp_path) is None


def test_a_pack_for_which_the_local_disk_has_no_room_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "store")
    packed(store)
    monkeypatch.setattr(pack_module, "has_room", lambda directory, room: False)
    assert "too little room" in refused(store)
    monkeypatch.undo()
    with pytest.raises(PackUnused, match="it is missing"):
        read_pack(store, "job", tmp_path / "missing")


def test_a_store_that_trickles_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "store")
    packed(store)
    monkeypatch.setattr(pack_module, "_CHUNK", 10)
    monkeypatch.setattr(pack_module, "_READ_WITHIN", 0.0)
    assert "slow" in refused(store)


def test_a_pack_that_is_replaced_as_it_is_opened_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "store")
    old = packed(store, DIGESTS[:2])
    packed(store)
    real, answers = pack_module.newest_pack, iter([old])
    monkeypatch.setattr(pack_module, "newest_pack", lambda *of: next(answers, None) or real(*of))
    with read(store) as pack:
        assert pack.digests == set(DIGESTS)
