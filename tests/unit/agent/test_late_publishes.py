"""Kernels that a node compiled before it had the store get there, once, and nothing else does."""

from __future__ import annotations

import asyncio
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from kcoord.agent.chores.chore import Chores
from kcoord.agent.chores.late_publishes import LatePublishes
from kcoord.artifacts import local
from kcoord.artifacts.choices import node_decided
from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.artifacts.store import Store
from kcoord.errors import StoreError
from kcoord.keys.cache_key import CacheKey
from kcoord.telemetry.events import Notices
from kcoord.telemetry.spans import KEY_DIGITS
from tests.support.agents import Node, end_agent
from tests.support.signing import OURS, trust


class Kernels:
    """A store, and a local directory whose artifacts have never been there."""

    def __init__(self, root: Path, store: Store | None = None) -> None:
        self.local_dir, self.store = root / "local", store or Store(root / "store")
        self.local_dir.mkdir(mode=0o700, parents=True)
        self.store.open()

    def make(self, name: str, home: Path | None = None) -> str:
        key = CacheKey.of("test", name)
        home = home or self.local_dir / local.place_of(key.digest)
        staging = local.new_staging(home)
        (staging / "kernel").write_text(name)
        local.publish_local(staging, home, key, 1.0, Origin(platform.node()))
        return key.digest

    def job(self, *used: str, usable: bool = True) -> set[str]:
        """An agent whose ranks load the artifacts `used`; returns what the store has when it has ended."""

        async def run() -> None:
            late = LatePublishes(self.store, self.local_dir, lambda: usable, Notices())
            late.used(digest[:KEY_DIGITS] for digest in used)
            await Chores(late.chores).drain(10)

        asyncio.run(run())
        return set(self.store.digests())


@pytest.fixture
def kernels(tmp_path: Path) -> Kernels:
    return Kernels(tmp_path)


def test_a_used_kernel_gets_into_the_store_and_an_unused_one_does_not(kernels: Kernels) -> None:
    used, _ = kernels.make("used"), kernels.make("of another project")
    assert kernels.job(used, "no digest", "ab" * 8) == {used}
    found = kernels.store.fetch(used)
    assert found is not None
    assert found[1] == {"kernel": b"used"}


def test_it_is_looked_for_once_in_each_store(kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = kernels.make("used")
    kernels.job(used)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "publish", lambda *rest: pytest.fail("a warm job costs the store nothing"))
        kernels.job(used)
    other = Store(tmp_path / "another store")
    other.open()
    kernels.store = other
    assert kernels.job(used) == {used}


def test_what_was_published_or_fetched_is_marked_without_a_look(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = kernels.make("published as usual")

    async def run() -> None:
        late = LatePublishes(kernels.store, kernels.local_dir, lambda: True, Notices())
        late.published(digest)
        await Chores(late.chores).drain(10)

    asyncio.run(run())
    monkeypatch.setattr(Store, "publish", lambda *rest: pytest.fail("it is there"))
    kernels.job(digest)


def test_a_choice_of_this_node_and_a_damaged_kernel_stay(kernels: Kernels) -> None:
    key = CacheKey.of("test", "choice")
    chosen = kernels.make("choice", home=node_decided(kernels.local_dir, key.digest))
    damaged = kernels.make("damaged")
    (kernels.local_dir / local.place_of(damaged) / "kernel").write_text("other")
    assert kernels.job(chosen, damaged) == set()


def test_what_came_from_another_store_is_not_signed_though_it_says_that_it_was_made_here(tmp_path: Path) -> None:
    """Its writer chooses what the manifest states, and a key that was good then may be bad now."""
    other, kernels = Kernels(tmp_path / "other"), Kernels(tmp_path / "mine", Store(tmp_path / "store", trust(OURS)))
    digest = other.make("theirs")
    found = local.read_artifact(other.local_dir / local.place_of(digest), digest)
    assert found is not None
    other.store.publish(found[0].manifest, found[1])
    home = other.store.home(digest)
    stated = Manifest.decode((home / "manifest.msgpack").read_bytes())
    assert not stated.made_here
    (home / "manifest.msgpack").write_bytes(replace(stated, made_here=True).encode())
    fetched = other.store.fetch(digest)
    assert fetched is not None
    local.install(fetched[0], fetched[1], kernels.local_dir / local.place_of(digest))
    assert kernels.job(digest) == set()


def test_a_kernel_that_the_store_refuses_holds_up_no_other(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [kernels.make(str(n)) for n in range(8)]
    native, tried = Store.publish, []

    def publish(store: Store, manifest: Manifest, contents: dict[str, bytes]) -> str:
        tried.append(manifest.key.digest)
        if manifest.key.digest == digests[3]:
            raise StoreError("over quota", "over quota")
        return native(store, manifest, contents)

    monkeypatch.setattr(Store, "publish", publish)
    assert kernels.job(*digests) == {*digests} - {digests[3]}
    assert len(tried) == len(digests)
    tried.clear()
    kernels.job(*digests)
    assert tried == [digests[3]], "the others are marked"


def test_a_compilers_own_cache_is_looked_into_unless_others_can_write_there(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("MY_CACHE_DIR", str(cache))
    used = kernels.make("used", home=cache / "used")
    cache.chmod(0o777)
    assert kernels.job(used) == set()
    cache.chmod(0o700)
    assert kernels.job(used) == {used}


def test_a_store_with_a_fault_is_left_alone_and_gets_it_later(kernels: Kernels) -> None:
    used = kernels.make("used")
    assert kernels.job(used, usable=False) == set()
    objects = kernels.store.root / "v1" / "objects"
    objects.rename(objects.with_name("away"))

    async def run() -> None:
        late = LatePublishes(kernels.store, kernels.local_dir, lambda: True, Notices())
        late.used([used[:KEY_DIGITS]])
        (chore,) = late.chores
        chore.begin()
        await chore.settled()
        objects.with_name("away").rename(objects)
        await Chores(late.chores).drain(10)

    asyncio.run(run())
    assert set(kernels.store.digests()) == {used}


def test_a_real_agent_publishes_what_a_rank_found_on_its_node(tmp_path: Path) -> None:
    with Node() as node:
        first = node.start()
        client = node.client()
        assert node.publish(client, node.claim(client, "k"), "k")
        end_agent(first.pid)
        store = Store(tmp_path / "store")
        store.open()
        node.settings = node.with_flags(store=str(store.root))
        second = node.start()
        digest = CacheKey.of("test", "k").digest
        span = ["load", "ok", "test", "k", digest[:KEY_DIGITS], 1.0, 0.1, 0.5, False, ""]
        assert node.client(store=str(store.root)).deliver({"local_hits": 1}, [span])
        end_agent(second.pid)
        assert set(store.digests()) == {digest}
