"""Packs: one file that serves as the store's artifacts do, and nothing of a damaged or forged one is ever loaded."""

from __future__ import annotations

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

from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.keys import CacheKey
from kcoord.packs import pack as pack_module
from kcoord.packs import writing
from kcoord.packs.automatic import automatic_name
from kcoord.packs.index import MOST_LISTED, Index, PackInvalid, Use
from kcoord.packs.pack import Pack, look_at_pack, read_pack, write
from kcoord.packs.pack_files import newest_pack, pack_name, packs_of, signer_of
from kcoord.packs.recipe import today
from kcoord.packs.recipe_files import forget_superfluous, save_part
from kcoord.packs.writing import added, own_pack, write_pack
from kcoord.testing.stores import FILES, manifest_of
from tests.support import packs
from tests.support.artifacts import older
from tests.support.fuzzing import fuzz, mutants
from tests.support.packs import listed_in, packed_in, uses
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
    packs.pack(store, digests, profile)
    (path,) = packs_of(store.root, profile)
    return path


@contextmanager
def read(store: Store, profile: str = "job") -> Iterator[Pack]:
    found = read_pack(store, profile, store.root.parent)
    assert found is not None
    with closing(found) as pack:
        yield pack


def refused(store: Store) -> str:
    with pytest.raises(PackInvalid) as caught:
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
            assert pack.fetch(digest, found[2]) == found
            assert pack.fetch(digest, "another manifest") is None
        assert pack.fetch("f" * 64) is None


def test_of_two_writers_at_once_one_pack_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, barrier = filled(tmp_path / "store"), threading.Barrier(2)

    def listed(root: Path, profile: str) -> list[Path]:
        barrier.wait(30)
        found = packs_of(root, profile)
        barrier.wait(30)
        return found

    monkeypatch.setattr(writing, "packs_of", listed)
    threads = [threading.Thread(target=packs.pack, args=(store, part)) for part in (DIGESTS[:2], DIGESTS[2:])]
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
        assert [path.name.startswith(old.name) for path in (store.root / "v2" / "trash").iterdir()] == [True]
        assert all(pack.fetch(digest) for digest in DIGESTS[:2])
    assert packed_in(store, new) == set(DIGESTS)


def test_of_two_packs_the_newest_counts(tmp_path: Path) -> None:
    """A writer was killed before it moved the old one."""
    store = filled(tmp_path / "store")
    old = packed(store, DIGESTS[:2])
    content = old.read_bytes()
    new = packed(store)
    old.write_bytes(content)
    older(new)  # its last use
    assert packs_of(store.root, "job") == [new, old]


def test_what_is_missing_torn_or_too_large_is_listed_without_its_bytes(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    store.home(DIGESTS[1]).write_bytes(b"torn")
    large = CacheKey.of("test", "large")
    noise = {"noise": os.urandom(40_000)}
    store.publish(manifest_of(noise, large), noise)
    used = uses([*DIGESTS, large.digest, "f" * 64])
    index = write_pack(store, "job", used, largest=30_000)
    assert {packed.use.digest for packed in index.packed} == {DIGESTS[0], *DIGESTS[2:]}
    assert sorted(listed_in(store, packs_of(store.root, "job")[0]).values(), key=str) == sorted(used, key=str)


def test_a_full_pack_holds_what_came_first_and_lists_all(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    order = [DIGESTS[2], DIGESTS[0], DIGESTS[3], DIGESTS[1]]
    found = store.object(DIGESTS[2])
    assert found is not None
    index = write_pack(store, "job", uses(order), room=int(2.5 * found.size))
    assert [packed.use.digest for packed in index.packed] == order[:2]
    assert [use.digest for use in index.listed] == order[2:]


# --- what comes from the pack before ---


def test_what_other_jobs_used_lately_stays_the_last_used_first(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    one, two, three, four = DIGESTS
    write_pack(store, "job", [*uses([one], ago=3), *uses([two], ago=11), *uses([three], ago=9), *uses([four], ago=30)])
    with own_pack(store, "job") as earlier:  # type: ignore[union-attr]
        now = [Use("e" * 64, "triton/X", today()), Use(one, "triton/Y", today())]
        found = added(now, earlier, since=today() - 10, loaded={four[:16]})
        assert found == [*now, *uses([four]), *uses([three], ago=9)], "ranks have loaded one from their disk"
        assert {use.digest for use in added(now, earlier, since=0)} == {*DIGESTS, "e" * 64}, "of a pinned profile"


def test_nothing_that_strangers_list_gets_our_signature(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", OURS)
    forged = packed(Store(store.root))
    forged.rename(forged.with_name(pack_name(1, "0" * 64, "main")))
    lax = Store(store.root, trust(OURS, policy="off"))
    with own_pack(lax, "job") as earlier:  # type: ignore[union-attr]
        assert added([], earlier, since=0) == []
    with pytest.raises(PackInvalid, match="not signed"):
        own_pack(store, "job")


def test_a_job_without_a_name_takes_the_pack_of_the_nearest(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    earlier, ours = automatic_name("train", 8, b"an earlier edit"), automatic_name("train", 8, b"now")
    path = packed(store, profile=earlier)
    assert newest_pack(store.root, ours) == path
    assert newest_pack(store.root, automatic_name("other", 8)) is None
    assert newest_pack(store.root, "train") is None


def test_the_pack_of_a_forgotten_profile_is_forgotten_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "store")
    names = [automatic_name("train", 8, str(n).encode()) for n in range(3)]
    for age, name in enumerate([*names, "named"]):
        save_part(store.root / "v2" / "profiles" / name, [recipe(1)])
        older(store.root / "v2" / "profiles" / name, 1000.0 * age)
        packed(store, profile=name)
    monkeypatch.setattr("kcoord.packs.automatic.KEPT", 2)
    forget_superfluous(store.root / "v2" / "profiles")
    assert [bool(packs_of(store.root, name)) for name in [*names, "named"]] == [True, True, False, True]


@pytest.mark.parametrize("linked", ["profiles", "packs"])
def test_nothing_is_forgotten_through_a_link_in_a_stores_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: str
) -> None:
    store = filled(tmp_path / "store")
    monkeypatch.setattr("kcoord.packs.automatic.KEPT", 1)
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
    monkeypatch.setattr("kcoord.packs.automatic.KEPT", 2)
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
    except PackInvalid:
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
    with look_at_pack(store, path) as pack:
        last = len(b"kcoord-pack-1\n") + pack.index.size - 1
    path.write_bytes(content[:last] + bytes([content[last] ^ 1]) + content[last + 1 :])
    assert served(store) == {digest: digest != DIGESTS[-1] for digest in DIGESTS}


@pytest.mark.parametrize(
    ("keys", "why"), [((), "not signed"), ((THEIRS,), "'other'"), ((f"main:{'c' * 64}",), "its signature")]
)
def test_where_signatures_are_required_a_pack_without_ours_is_refused_before_anything_is_read(
    tmp_path: Path, keys: tuple[str, ...], why: str
) -> None:
    """Its name claims that we have signed it."""
    store = filled(tmp_path / "store", *keys)
    path = packed(store)
    path.rename(path.with_name(pack_name(1, "0" * 64, "main")))
    told = refused(Store(store.root, trust(OURS)))
    assert why in told
    assert "KCOORD_TRUST=off if you know" in told


def test_a_pack_of_one_signer_leaves_the_packs_of_others(tmp_path: Path) -> None:
    ours = filled(tmp_path / "store", OURS)
    theirs, nobodys = Store(ours.root, trust(THEIRS)), Store(ours.root)
    both = Store(ours.root, trust(THEIRS, OURS, policy="off"))
    for writer in (ours, nobodys, theirs, nobodys):
        for earlier in packs_of(ours.root, "job"):
            older(earlier, 1.0)
        packs.pack(writer, DIGESTS)
    with read(ours) as pack:
        assert all(pack.fetch(digest) for digest in DIGESTS)
    signers = [signer_of(path) for path in packs_of(ours.root, "job")]
    assert signers == ["", "other", "main"]
    newest = [newest_pack(ours.root, "job", reader.trust) for reader in (ours, theirs, nobodys, both)]
    assert [path and signer_of(path) for path in newest] == ["main", "other", "", "other"]
    packed_by_us = next(path for path in packs_of(ours.root, "job") if signer_of(path) == "main")
    packed_by_us.unlink()
    assert read_pack(ours, "job", tmp_path) is None, "the others are not read where our signature is required"


def test_an_unsigned_artifact_in_a_signed_pack_is_refused(tmp_path: Path) -> None:
    """The signature of the pack does not vouch for an artifact."""
    store = filled(tmp_path / "store", OURS)
    unsigned(store.home(DIGESTS[0]))
    lax = Store(store.root, Trust("off", store.trust.keys))
    assert packs.pack(lax, DIGESTS) == set(DIGESTS[1:]), "our own writers leave its bytes out"
    path = packed(lax)
    with path.open("wb") as file:
        write(file, store.trust, ((use, lax.object(use.digest)) for use in uses(DIGESTS)), {})
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


def framed(index: bytes) -> bytes:
    return b"kcoord-pack-1\n" + index + len(index).to_bytes(8, "big")


def test_an_index_that_is_larger_than_any_of_ours_is_not_decoded(tmp_path: Path) -> None:
    """Nobody has signed it, and the policy lets that pass."""
    store = filled(tmp_path / "store")
    path = packed(store)
    with path.open("r+b") as file:
        file.truncate(60 << 20)
        file.seek(-8, os.SEEK_END)
        file.write((50 << 20).to_bytes(8, "big"))
    assert "huge" in refused(store)
    many = Index(listed=tuple(Use(f"{n:064x}") for n in range(MOST_LISTED + 1)))
    path.write_bytes(framed(many.encode()))
    assert "100001 entries, of 100000" in refused(store)
    with pytest.raises(PackInvalid):
        look_at_pack(store, path)


def test_an_index_of_many_small_values_takes_little_memory(tmp_path: Path) -> None:
    """Each would take ten times its bytes, and more."""
    store = filled(tmp_path / "store")
    path, count = packed(store), 3_000_000
    for rows in (b"", b"\x90"):
        for value in (b"\x80", b"\x90", b"\x91\x80", b"\xa0", b"\xc4\x00"):
            index = b"\x94\x01" + rows + b"\xdd" + count.to_bytes(4, "big") + value * count
            path.write_bytes(framed(index))
            tracemalloc.start()
            try:
                for most in (MOST_LISTED, 1 << 31):
                    with pytest.raises(PackInvalid):
                        Pack(path, store, most=most)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak < 6 * len(index)


def test_a_pack_for_which_the_local_disk_has_no_room_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "store")
    packed(store)
    monkeypatch.setattr(pack_module, "has_room", lambda directory, room: False)
    assert "too little room" in refused(store)
    monkeypatch.undo()
    with pytest.raises(PackInvalid, match="it is missing"):
        read_pack(store, "job", tmp_path / "missing")


def test_a_store_that_trickles_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "store")
    packed(store)
    monkeypatch.setattr(pack_module, "_CHUNK", 10)
    monkeypatch.setattr(pack_module, "_READ_WITHIN", 0.0)
    assert "slow" in refused(store)
