"""Retention of packs: they count, they go before what is used, and whoever reads one keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcoord.artifacts.store import Store
from kcoord.files import beneath
from kcoord.packs.pack import read_pack
from kcoord.packs.pack_files import pack_name, packs_directory, packs_of
from kcoord.retention.limits import Collected, Limits
from kcoord.retention.store_collector import collect, count
from kcoord.retention.tidying import Tidying
from tests.support.artifacts import DAY, older, publish
from tests.support.command import as_json
from tests.support.packs import pack
from tests.support.sandbox import Sandbox
from tests.support.signing import OURS, trust

ARTIFACTS = 4


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return made(tmp_path / "store")


def made(root: Path) -> Store:
    """A store of four artifacts that were used today, and of their pack, which was written twenty days ago."""
    store = Store(root)
    store.open()
    digests = [publish(store, f"k{n}") for n in range(ARTIFACTS)]
    pack(store, digests)
    older(pack_of(store), 20 * DAY)
    return store


def pack_of(store: Store) -> Path:
    (path,) = packs_of(store.root, "job")
    return path


def run(store: Store, dry_run: bool = False, least_age: float = 0.0, **limits: float) -> Collected:
    return collect(store.root, Limits(**limits, least_age=least_age), dry_run=dry_run)  # type: ignore[arg-type]


def test_a_pack_counts_in_bytes_and_files_and_as_no_artifact(store: Store) -> None:
    artifacts, size, files = count(store.root).left
    pack_of(store).unlink()
    without = count(store.root)
    assert artifacts == without.artifacts == ARTIFACTS
    assert files - without.inodes == 1
    assert size > without.size


def test_a_pack_that_nobody_has_read_for_long_goes_and_its_artifacts_stay(store: Store) -> None:
    path = pack_of(store)
    name = f"packs/job/{path.name}"
    assert [d.entry.name for d in run(store, dry_run=True, unused_for=10 * DAY).removed] == [name]
    assert path.exists()
    found = run(store, unused_for=10 * DAY)
    assert [d.entry.name for d in found.removed] == [name]
    assert found.left[0] == ARTIFACTS == len(list(store.digests()))
    assert packs_of(store.root, "job") == []
    assert not path.parent.exists()


def test_a_pack_that_jobs_read_stays(store: Store) -> None:
    beneath.mark_used(pack_of(store), store.root)
    assert run(store, unused_for=10 * DAY).removed == []
    pack_of(store)


def test_a_pack_that_jobs_read_keeps_what_it_lists_whatever_jobs_have_of_it_on_their_nodes(store: Store) -> None:
    (unlisted,) = [publish(store, "unlisted")]
    for digest in store.digests():
        older(store.home(digest), 40 * DAY)
    beneath.mark_used(pack_of(store), store.root)
    assert [d.entry.name for d in run(store, unused_for=10 * DAY).removed] == [unlisted]
    older(pack_of(store), 20 * DAY)
    assert len(run(store, unused_for=10 * DAY).removed) == ARTIFACTS + 1


def test_where_signatures_are_required_a_pack_that_nobody_signed_keeps_nothing(store: Store) -> None:
    for digest in store.digests():
        older(store.home(digest), 40 * DAY)
    beneath.mark_used(pack_of(store), store.root)
    found = collect(store.root, Limits(unused_for=10 * DAY, least_age=0), trust=trust(OURS), dry_run=True)
    assert len(found.removed) == ARTIFACTS


def test_a_quota_takes_the_pack_first_if_it_is_the_oldest(store: Store) -> None:
    every = run(store, dry_run=True)
    found = run(store, max_size=every.size - 1)
    assert [d.entry.kind for d in found.removed] == ["pack"]
    assert run(store, max_files=ARTIFACTS - 1).left[0] == ARTIFACTS - 1


def test_a_node_that_reads_a_pack_keeps_it_when_it_is_removed(store: Store, tmp_path: Path) -> None:
    with read_pack(store, "job", tmp_path) as copy:  # type: ignore[union-attr]
        run(store, max_size=0)
        collect(store.root, Limits(), tidying=Tidying(grace=-1))
        assert list(store.digests()) == []
        assert all(copy.fetch(digest) for digest in copy.digests)


def test_other_files_and_links_there_are_left_alone(store: Store, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / pack_name(1, "a" * 64, "")).touch()
    packs_directory(store.root, "linked").symlink_to(tmp_path / "theirs")
    (packs_directory(store.root, "job") / "notes.txt").touch()
    (packs_directory(store.root, "job") / pack_name(1, "b" * 64, "")).mkdir()
    (packs_directory(store.root, "") / "file").touch()
    assert len(run(store, max_size=0).removed) == ARTIFACTS + 1
    assert (tmp_path / "theirs" / pack_name(1, "a" * 64, "")).exists()
    assert (packs_directory(store.root, "job") / "notes.txt").exists()


def test_verify_names_a_pack_that_is_damaged_or_that_no_key_of_ours_has_signed(sandbox: Sandbox) -> None:
    store = made(sandbox.root / "store")
    there = {"KCOORD_STORE": str(store.root)}
    signed = {**there, "KCOORD_SIGNING_KEY": OURS}
    told = as_json(sandbox, "verify", code=1, **signed)
    assert "not signed" in told["bad"][str(pack_of(store))]
    whole = as_json(sandbox, "verify", **there)
    assert (whole["whole"], whole["packs"], whole["bad"]) == (ARTIFACTS, 1, {})
    content = bytearray(pack_of(store).read_bytes())
    content[100] ^= 1
    pack_of(store).write_bytes(content)
    told = as_json(sandbox, "verify", code=1, **there)
    assert (told["whole"], told["packs"], list(told["bad"])) == (ARTIFACTS, 0, [str(pack_of(store))])
