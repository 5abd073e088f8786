"""The job's pack is written by one agent, when its ranks have what they need, and only if that is worth it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kcoord.agent import packs as packs_module
from kcoord.agent.chores.packing import PackWriter
from kcoord.agent.packs import Packs, UsedArtifacts
from kcoord.agent.store_breaker import StoreBreaker
from kcoord.artifacts import local
from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.leases.base import Lease
from kcoord.leases.local import LocalLeases
from kcoord.packs.pack import Pack
from kcoord.packs.pack_files import newest_pack, note_here, packs_of, was_here
from kcoord.packs.recipe import today
from kcoord.packs.writing import write_pack
from kcoord.retention.pins import pin
from kcoord.telemetry.events import Notices
from tests.support.agents import key_of
from tests.support.artifacts import DAY, older, publish
from tests.support.packs import listed_in, pack, packed_in, uses
from tests.support.signing import OURS, trust

NAMES = [f"k{n}" for n in range(20)]
DIGESTS = {name: key_of(name).digest for name in NAMES}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.open()
    for name in NAMES:
        publish(made, name)
    return made


class World:
    """One agent's packs and their writer, and the leases that it shares with others."""

    def __init__(self, store: Store, quiet: float = 30.0, kept: float = 1800.0) -> None:
        self.store, self.leases, self.notices = store, LocalLeases(15.0, 900.0, 30.0), Notices()
        self.leases.reaches_nodes = True  # as if they were Redis'
        here = store.root.parent
        self.packs = Packs(StoreBreaker(store, self.notices), here, self.notices, kept)
        self.used = UsedArtifacts(here)
        self.writer = PackWriter(
            store, "job", self.packs, self.used, self.leases, "us", 15.0, self.notices, quiet=quiet
        )
        _, self.chore = self.writer.chores

    def use(self, *names: str) -> None:
        for name in names:
            self.used.asked(DIGESTS[name], str(self.store.root.parent / local.place_of(DIGESTS[name])))
            self.used.stored(DIGESTS[name])

    async def attempt(self) -> None:
        self.chore.begin()
        await self.chore.settled()

    async def read(self) -> Pack:
        self.packs.begin("job")
        while self.packs.is_unread("job"):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)
        pack = self.packs.get("job")
        assert pack is not None
        return pack

    def held(self) -> set[str] | None:
        """The names in the newest pack; None if there is none."""
        found = packs_of(self.store.root, "job")
        if not found:
            return None
        digests = packed_in(self.store, found[0])
        return {name for name in NAMES if DIGESTS[name] in digests}


def played(store: Store, scene: Callable[[World], Awaitable[None]], quiet: float = 30.0, kept: float = 1800.0) -> None:
    async def scenario() -> None:
        world = World(store, quiet, kept)
        await scene(world)
        assert not world.leases._held
        world.packs.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_it_is_written_when_nothing_new_was_used_for_a_while(store: Store) -> None:
    async def scene(world: World) -> None:
        world.use(*NAMES)
        world.chore.pulse(time.monotonic())
        assert not world.chore.under_way, "the ranks have just asked"
        await asyncio.sleep(0.1)
        world.chore.pulse(time.monotonic())
        await world.chore.settled()
        assert world.held() == set(NAMES)
        world.use(*NAMES)
        world.chore.pulse(time.monotonic() + 1000)
        assert not world.chore.under_way, "nothing has changed since"

    played(store, scene, quiet=0.05)


def test_it_is_written_at_once_when_the_last_rank_has_left(store: Store) -> None:
    async def scene(world: World) -> None:
        world.use(*NAMES)
        world.chore.run_soon()
        assert not world.chore.under_way, "the ranks have just asked"
        world.used.asked(key_of("on its way").digest, "/nowhere/else")
        world.writer.job_ended()
        world.chore.pulse(time.monotonic())
        assert not world.chore.under_way, "one is on its way into the store"
        world.used.stored(key_of("on its way").digest)
        world.chore.pulse(time.monotonic())
        await world.chore.settled()
        assert world.held() == set(NAMES)
        world.use("k0")

    played(store, scene)


def test_the_first_artifact_is_worth_a_pack_and_then_a_tenth_of_many(store: Store) -> None:
    async def scene(world: World) -> None:
        for count, held in ((1, 1), (17, 17), (18, 17), (20, 20)):
            world.use(*NAMES[:count])
            await world.attempt()
            assert world.held() == set(NAMES[:held])

    played(store, scene)


def test_the_pack_of_a_pinned_profile_lists_all_that_its_jobs_ever_used(store: Store) -> None:
    pin(store.root, "job")
    write_pack(store, "job", uses(DIGESTS.values(), ago=100))
    new = key_of("new").digest

    async def scene(world: World) -> None:
        world.use(*NAMES)
        world.used.stored(new)
        world.used.asked(new, "/nowhere/else")
        await world.attempt()
        (path,) = packs_of(store.root, "job")
        listed = listed_in(store, path)
        assert listed.keys() == {*DIGESTS.values(), new}
        assert listed[new].place == ""
        path.write_bytes(b"torn")
        world.used.asked(newer := key_of("newer").digest, "/nowhere/else")
        world.used.stored(newer)
        await world.attempt()
        assert path.read_bytes() == b"torn", "nobody knows what the pin keeps: somebody has to look"

    played(store, scene)


def test_while_another_agent_writes_none_is_written_and_then_its_pack_is_looked_at(store: Store) -> None:
    async def scene(world: World) -> None:
        theirs = await world.leases.acquire("pack job", "theirs", "another node")
        assert isinstance(theirs, Lease)
        world.use(*NAMES)
        await world.attempt()
        assert world.held() is None
        pack(store, list(DIGESTS.values())[:19])
        await theirs.release()
        await world.attempt()
        assert world.held() == set(NAMES[:19]), "that is enough"
        shutil.rmtree(store.root)
        await world.attempt()  # it remembers, and looks no more
        assert world.notices.since(0)[0] == []

    played(store, scene)


def test_what_other_nodes_use_stays_and_what_no_job_has_used_for_days_goes(store: Store) -> None:
    others = [DIGESTS[name] for name in NAMES[:10]]
    write_pack(store, "job", [*uses(others[:4], ago=9), *uses(others[4:], ago=11)])

    async def scene(world: World) -> None:
        world.use(*NAMES[10:])
        world.used.loaded([others[9][:16], "no digest"])  # from a node's disk: nobody asks for it
        await world.attempt()
        assert world.held() == {*NAMES[:4], *NAMES[9:]}
        listed = listed_in(store, packs_of(store.root, "job")[0])
        assert {listed[DIGESTS[name]].day for name in NAMES[9:]} == {today()}
        assert listed[others[0]].day == today() - 9
        assert listed[others[9]].place == local.place_of(others[9])

    played(store, scene)


def test_a_node_whose_pack_lists_all_asks_the_store_for_nothing(store: Store) -> None:
    pack(store, DIGESTS.values())

    async def scene(world: World) -> None:
        await world.read()
        shutil.rmtree(store.root)
        world.use(*NAMES)
        await world.attempt()
        assert world.writer._considered == (len(NAMES), 0)

    played(store, scene)


def test_an_agent_with_other_keys_leaves_a_pack_as_it_is(store: Store) -> None:
    signed = Store(store.root, trust(OURS, policy="off"))
    for name in NAMES:
        publish(signed, f"signed {name}")
    digests = [key_of(f"signed {name}").digest for name in NAMES]
    pack(signed, digests)

    async def scene(world: World) -> None:
        world.use(*NAMES)
        await world.attempt()
        assert world.held() is not None
        path = newest_pack(store.root, "job", trust(OURS))
        assert path is not None
        assert packed_in(signed, path) == set(digests)

    played(store, scene)


def test_a_pack_that_is_found_damaged_is_written_anew(store: Store) -> None:
    pack(store, DIGESTS.values())
    (path,) = packs_of(store.root, "job")
    content = bytearray(path.read_bytes())
    for place in range(100, len(content) // 2, 100):
        content[place] ^= 1
    path.write_bytes(content)

    async def scene(world: World) -> None:
        read = await world.read()
        world.use(*NAMES)
        await world.attempt()
        assert path.read_bytes() == content, "nobody has noticed"
        for digest in DIGESTS.values():
            with suppress(ArtifactInvalid):
                read.fetch(digest)
        assert len(read.digests) < len(NAMES)
        await world.attempt()
        assert world.held() == set(NAMES)
        assert not path.exists()

    played(store, scene)


def test_a_store_that_takes_nothing_is_tried_again(store: Store) -> None:
    staging = store.root / "v2" / "staging"

    async def scene(world: World) -> None:
        staging.rmdir()
        world.use(*NAMES)
        await world.attempt()
        assert world.held() is None
        staging.mkdir()
        await world.attempt()
        assert world.held() == set(NAMES)

    played(store, scene)


def test_a_node_that_signs_nothing_writes_none_and_neither_does_one_without_a_profile(store: Store) -> None:
    async def scene(world: World) -> None:
        verifies = Store(store.root, Trust("require", {}))
        for where, profile in ((verifies, "job"), (store, None), (None, "job")):
            writer = PackWriter(where, profile, world.packs, world.used, world.leases, "us", 15.0, world.notices)
            assert [chore.name for chore in writer.chores] == ["uses of packs"][: where is not None]
        with pytest.raises(StoreError, match="only verify"):
            pack(verifies, DIGESTS.values())

    played(store, scene)


# --- the packs that an agent has read ---


def test_a_pack_that_serves_is_touched_once_a_day_and_so_is_one_whose_artifacts_are_here(store: Store) -> None:
    pack(store, DIGESTS.values())
    (path,) = packs_of(store.root, "job")

    async def scene(world: World) -> None:
        older(path, 2 * DAY)
        await world.read()
        assert time.time() - path.stat().st_mtime < DAY
        note_here(store.root.parent, path.stem)
        older(path, 2 * DAY)
        assert was_here(store.root, "job", store.trust, store.root.parent)
        assert time.time() - path.stat().st_mtime < DAY
        before = older(path, DAY / 2).stat().st_mtime
        await world.packs.touch()
        assert path.stat().st_mtime == before
        older(path, DAY)
        await world.packs.touch()  # of a job that runs for days
        assert time.time() - path.stat().st_mtime < DAY

    played(store, scene)


def test_a_pack_gives_its_space_back_when_the_job_has_long_started(store: Store) -> None:
    pack(store, DIGESTS.values())

    async def scene(world: World) -> None:
        pack = await world.read()
        while world.packs.get("job") is not None:
            await asyncio.sleep(0.005)
        while pack.fetch(DIGESTS["k1"]) is not None:
            await asyncio.sleep(0.005)
        assert await world.packs.announced(DIGESTS["k1"]) is None
        await world.read()  # for the next job

    played(store, scene, kept=0.5)


def test_a_read_that_is_given_up_or_fails_does_not_keep_the_writer_waiting(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(world: World) -> None:
        async def silent(work: object) -> None:
            await asyncio.sleep(3600)

        monkeypatch.setattr(world.packs._store, "use", silent)
        world.packs.begin("job")
        assert world.packs.is_unread("job")
        world.packs.close()
        await asyncio.sleep(0)
        assert not world.packs.is_unread("job")

        async def fails(work: object) -> None:
            raise RuntimeError("unexpected")

        monkeypatch.setattr(world.packs._store, "use", fails)
        world.packs.begin("job")
        for _ in range(5):
            await asyncio.sleep(0)
        assert not world.packs.is_unread("job")

    played(store, scene)


def test_a_pack_that_is_read_late_serves_its_whole_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(store, DIGESTS.values())
    monkeypatch.setattr(packs_module, "was_here", lambda *_: True)

    async def scene(world: World) -> None:
        world.packs.begin("job")
        begun = time.monotonic()
        await asyncio.sleep(1.5)
        while (pack := world.packs.get("job")) is None:
            assert await world.packs.announced(DIGESTS["k1"])
        await asyncio.sleep(max(0.0, begun + 3.2 - time.monotonic()))
        assert world.packs.get("job") is pack

    played(store, scene, kept=3.0)


def test_one_agent_has_the_packs_of_a_few_profiles_at_most(store: Store) -> None:
    profiles = [f"job{n}" for n in range(6)]
    for profile in profiles:
        pack(store, DIGESTS.values(), profile)

    async def scene(world: World) -> None:
        for profile in profiles:
            world.packs.begin(profile)
        while any(map(world.packs.is_unread, profiles)):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)
        assert sum(world.packs.get(profile) is not None for profile in profiles) == 4

    played(store, scene)


def test_an_agent_of_many_jobs_packs_the_bytes_of_what_the_last_ones_used(store: Store) -> None:
    async def scene(world: World) -> None:
        world.use(*NAMES)
        world.use(*NAMES[:3])
        assert [use.digest for use in world.used.uses()][:3] == [DIGESTS[name] for name in NAMES[2::-1]]
        world.used.asked("no digest", "/nowhere")
        world.used.stored("no digest")
        world.used.asked("f" * 64, "/of/a/compile/that/failed")
        assert len(world.used.uses()) == len(NAMES)

    played(store, scene)
