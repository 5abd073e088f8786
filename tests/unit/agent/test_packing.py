"""The job's pack is written by one agent, when its ranks have what they need, and only if that is worth it."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kcoord.agent import early_packs
from kcoord.agent import packs as packs_module
from kcoord.agent.chores import packing
from kcoord.agent.chores.packing import PackWriter
from kcoord.agent.early_packs import EarlyPacks
from kcoord.agent.packs import Packs
from kcoord.agent.store_breaker import StoreBreaker
from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files.bounded_threads import in_thread
from kcoord.leases.base import Lease
from kcoord.leases.local import LocalLeases
from kcoord.profiles.packs import newest_pack, packs_of
from kcoord.retention.uses import note_uses, prefix_of
from kcoord.telemetry.events import Notices
from kcoord.transfer import pack as pack_module
from kcoord.transfer.pack import Pack, look_at_pack, read_pack, write_pack
from tests.support.agents import key_of
from tests.support.artifacts import DAY, older, publish
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

    def __init__(self, store: Store) -> None:
        self.store, self.leases, self.notices = store, LocalLeases(15.0, 900.0, 30.0), Notices()
        self.served: list[str] = []
        here = store.root.parent
        self.packs = Packs(StoreBreaker(store, self.notices), self.at, here, self.notices, self.served.append)
        self.early = EarlyPacks(self.leases, "job", self.packs)
        self.writer = PackWriter(store, "job", self.packs, self.early, self.leases, "us", 15.0, self.notices)
        (self.chore,) = self.writer.chores

    async def at(self, homes: tuple[Path, ...], work: Callable[[], Manifest | None]) -> Manifest | None:
        return await in_thread(work)

    def use(self, *names: str) -> None:
        for name in names:
            stated = self.store.stated(DIGESTS[name])
            assert stated is not None
            self.packs.note(stated[0])

    async def attempt(self) -> None:
        await asyncio.sleep(0.01)  # a pack that is written now is newer than the last one
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
        digests = look_at_pack(self.store, found[0])
        return {name for name in NAMES if DIGESTS[name] in digests}


def played(store: Store, scene: Callable[[World], Awaitable[None]]) -> None:
    async def scenario() -> None:
        world = World(store)
        await scene(world)
        assert not world.leases.held
        world.packs.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_it_is_written_when_nothing_new_was_used_for_a_while(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        world.use(*NAMES)
        world.chore.pulse(time.monotonic())
        assert not world.chore.under_way, "the ranks have just asked"
        monkeypatch.setattr(packing, "_QUIET", 0.0)
        world.chore.pulse(time.monotonic())
        await world.chore.settled()
        assert world.held() == set(NAMES)
        world.chore.pulse(time.monotonic() + 1000)
        assert not world.chore.under_way, "nothing has changed since"

    played(store, scene)


def test_a_handful_is_not_worth_a_file_but_a_tenth_of_many_is(store: Store) -> None:
    async def scene(world: World) -> None:
        world.use(*NAMES[:7])
        await world.attempt()
        assert world.held() is None
        world.use(*NAMES[:17])
        await world.attempt()
        assert world.held() == set(NAMES[:17])
        world.use(NAMES[17])
        await world.attempt()
        assert world.held() == set(NAMES[:17])
        world.use(*NAMES)
        await world.attempt()
        assert world.held() == set(NAMES)

    played(store, scene)


def test_while_another_agent_writes_none_is_written_and_then_its_pack_is_looked_at(store: Store) -> None:
    async def scene(world: World) -> None:
        theirs = await world.leases.acquire("pack job", "theirs", "another node")
        assert isinstance(theirs, Lease)
        world.use(*NAMES)
        await world.attempt()
        assert world.held() is None
        write_pack(store, "job", list(DIGESTS.values())[:19])
        await theirs.release()
        await world.attempt()
        assert world.held() == set(NAMES[:19]), "that is enough"
        shutil.rmtree(store.root)
        await world.attempt()  # it remembers, and looks no more
        assert world.notices.since(0)[0] == []

    played(store, scene)


def test_what_other_nodes_use_stays_and_what_no_job_has_used_for_days_goes(store: Store) -> None:
    write_pack(store, "job", [DIGESTS[name] for name in NAMES[:10]])
    note_uses(store.root, [prefix_of(DIGESTS[name]) for name in NAMES[:3]])

    async def scene(world: World) -> None:
        world.use(*NAMES[10:])
        (path,) = packs_of(store.root, "job")
        older(path, 11 * DAY)
        await world.attempt()
        assert world.held() == {*NAMES[:3], *NAMES[10:]}

    played(store, scene)


def test_what_nobody_uses_goes_also_from_a_pack_that_is_replaced_often(store: Store) -> None:
    async def scene(world: World) -> None:
        for number in range(3):
            used = NAMES[6 * number :][:8]
            others = World(store)  # of the next job
            others.use(*used)
            await others.attempt()
            for path in (*packs_of(store.root, "job"), *(store.root / "v2" / "used").iterdir()):
                older(path, 7 * DAY)
            assert others.held() == {*NAMES[max(0, 6 * number - 6) : 6 * number], *used}

    played(store, scene)


def test_of_what_other_nodes_use_the_last_used_stays_if_room_is_short(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pack(store, "job", [DIGESTS[name] for name in NAMES[:10]])
    note_uses(store.root, [prefix_of(DIGESTS[name]) for name in NAMES[:5]])
    for path in (store.root / "v2" / "used").iterdir():
        older(path, 2 * DAY)
    note_uses(store.root, [prefix_of(DIGESTS[name]) for name in NAMES[5:8]])
    monkeypatch.setattr(pack_module, "MOST_PACKED", 13)

    async def scene(world: World) -> None:
        world.use(*NAMES[10:])
        await world.attempt()
        assert world.held() == {*NAMES[5:8], *NAMES[10:]}

    played(store, scene)


def test_an_agent_with_other_keys_leaves_a_pack_as_it_is(store: Store) -> None:
    signed = Store(store.root, trust(OURS, policy="off"))
    for name in NAMES:
        publish(signed, f"signed {name}")
    digests = [key_of(f"signed {name}").digest for name in NAMES]
    write_pack(signed, "job", digests)

    async def scene(world: World) -> None:
        world.use(*NAMES)
        await world.attempt()
        assert world.held() is not None
        path = newest_pack(store.root, "job", trust(OURS))
        assert path is not None
        assert look_at_pack(signed, path) == set(digests)

    played(store, scene)


def test_a_pack_that_is_found_damaged_is_written_anew(store: Store) -> None:
    write_pack(store, "job", DIGESTS.values())
    (path,) = packs_of(store.root, "job")
    whole = path.read_bytes()
    content = bytearray(whole)
    for place in range(len(content) // 2, len(content), 100):
        content[place] ^= 1
    path.write_bytes(content)

    async def scene(world: World) -> None:
        pack = await world.read()
        world.use(*NAMES)
        await world.attempt()
        assert path.read_bytes() == content, "nobody has noticed"
        for digest in DIGESTS.values():
            with suppress(ArtifactInvalid):
                pack.fetch(digest)
        assert len(pack.digests) < len(NAMES)
        await world.attempt()
        assert path.read_bytes() == whole

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
            writer = PackWriter(where, profile, world.packs, world.early, world.leases, "us", 15.0, world.notices)
            assert writer.chores == []
        with pytest.raises(StoreError, match="only verify"):
            write_pack(verifies, "job", DIGESTS.values())

    played(store, scene)


# --- while the job still compiles ---


class Told(LocalLeases):
    """All agents hear that all keys are READY."""

    followers = 8

    def ready_keys(self, before: float = 0.0) -> list[str]:
        return list(DIGESTS.values())


def test_while_a_slow_store_has_much_for_this_node_the_pack_of_what_the_job_compiled_is_written_at_once(
    store: Store,
) -> None:
    async def scene(world: World) -> None:
        leases = Told(15.0, 900.0, 30.0)
        world.use("k0")
        now = 0.0
        early = EarlyPacks(leases, "job", world.packs, lambda: now)
        (chore,) = PackWriter(store, "job", world.packs, early, leases, "us", 15.0, world.notices).chores
        with early.fetching():
            now += 0.01
        assert not chore.under_way
        with early.fetching():
            now += 60.0
        await asyncio.sleep(0.15)  # until it counts
        assert chore.under_way or world.held()
        await chore.settled()
        assert world.held() == set(NAMES)
        assert not leases.held
        await world.packs.renew("job")
        assert early.wanted() == [], "the pack states all that is READY"

    played(store, scene)


def test_what_an_early_pack_had_no_time_for_is_in_the_next_one_beside_what_the_first_one_has(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early_packs, "_GATHERED_WITHIN", 0.0)

    async def scene(world: World) -> None:
        now, leases = 0.0, Told(15.0, 900.0, 30.0)
        early = EarlyPacks(leases, "job", world.packs, lambda: now)
        (chore,) = PackWriter(store, "job", world.packs, early, leases, "us", 15.0, world.notices).chores
        with early.fetching():
            now += 60.0
        for count in (1, 2):
            assert len(early.wanted()) == len(NAMES)
            await asyncio.sleep(0.01)  # a pack that is written now is newer than the last one
            chore.begin()
            await chore.settled()
            await world.packs.renew("job")
            pack = world.packs.get("job")
            assert pack is not None
            assert len(pack.digests) == count
            for digest in pack.digests:  # the next pack has them from this one
                store.home(digest).unlink(missing_ok=True)

    played(store, scene)


def test_a_newer_pack_takes_the_place_of_the_one_that_serves(store: Store) -> None:
    async def scene(world: World) -> None:
        await world.packs.renew("job")
        assert world.packs.get("job") is None
        write_pack(store, "job", [DIGESTS["k0"]])
        await world.packs.renew("job")
        assert world.packs.states(DIGESTS["k0"])
        assert not world.packs.states(DIGESTS["k1"])
        old = world.packs.get("job")
        await world.packs.renew("job")
        assert world.packs.get("job") is old, "there is no newer one"
        await asyncio.sleep(0.01)
        write_pack(store, "job", [DIGESTS["k0"], DIGESTS["k1"]])
        await world.packs.renew("job")
        assert world.packs.states(DIGESTS["k1"])
        announced = await world.packs.announced(DIGESTS["k1"])
        assert announced is not None
        assert await world.packs.bring(DIGESTS["k1"], store.root.parent / "home", announced) is not None
        assert old is not None
        while old.fetch(DIGESTS["k0"]) is not None:  # its copy gives its space back
            await asyncio.sleep(0.005)

    played(store, scene)


def test_a_newer_pack_is_read_although_the_older_one_is_being_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pack(store, "job", [DIGESTS["k0"]])
    older = threading.Event()

    def read_slowly(*given: Any, **named: Any) -> Pack | None:
        found = read_pack(*given, **named)
        older.wait(60)
        return found

    monkeypatch.setattr(packs_module, "read_pack", read_slowly)

    async def scene(world: World) -> None:
        world.packs.begin("job")
        await asyncio.sleep(0.2)
        write_pack(store, "job", [DIGESTS["k0"], DIGESTS["k1"]])
        renewing = asyncio.create_task(world.packs.renew("job"))
        await asyncio.sleep(0.01)
        older.set()
        await renewing
        assert world.packs.states(DIGESTS["k1"])

    played(store, scene)


@pytest.mark.parametrize("refuses", [True, False])
def test_what_no_pack_takes_is_offered_once_and_a_store_that_takes_none_is_left_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """Artifacts of more than 8 MiB are in no pack, say."""
    tries: list[float] = []

    def write_some(store: Store, profile: str, digests: Iterable[str], **how: Any) -> frozenset[str]:
        tries.append(time.monotonic())
        if refuses:
            raise StoreError("read-only")
        return write_pack(store, profile, list(digests)[-1:], **how)

    monkeypatch.setattr(packing, "write_pack", write_some)

    async def scene(world: World) -> None:
        now = 0.0
        leases = Told(15.0, 900.0, 30.0)
        early = EarlyPacks(leases, "job", world.packs, lambda: now)
        (chore,) = PackWriter(store, "job", world.packs, early, leases, "us", 15.0, world.notices).chores
        with early.fetching():
            now += 60.0
        for _ in range(3):
            chore.begin()
            await chore.settled()
        assert early.wanted() == []

    played(store, scene)
    assert len(tries) == 1


def test_a_newer_pack_that_cannot_be_used_leaves_the_one_that_serves(store: Store) -> None:
    write_pack(store, "job", [DIGESTS["k0"]])

    async def scene(world: World) -> None:
        old = await world.read()
        await asyncio.sleep(0.01)
        packs_of(store.root, "job")[0].with_name(f"{'f' * 64}.pack").write_bytes(b"torn")
        await world.packs.renew("job")
        assert world.packs.get("job") is old
        assert [notice.partition(":")[0] for notice in world.notices.since(0)[0]] == ["the pack of job is not used"]

    played(store, scene)


# --- the packs that an agent has read ---


def test_retention_hears_once_of_a_pack_that_serves(store: Store) -> None:
    write_pack(store, "job", DIGESTS.values())

    async def scene(world: World) -> None:
        await world.read()
        announced = await world.packs.announced(DIGESTS["k1"])
        assert announced is not None
        assert await world.packs.bring(DIGESTS["k1"], store.root.parent / "homes" / "0", "another manifest") is None
        assert world.served == []
        for number in range(2):
            brought = await world.packs.bring(DIGESTS["k1"], store.root.parent / "homes" / str(number), announced)
            assert brought is not None
            assert brought.key.digest == DIGESTS["k1"]
        assert world.served == [packs_of(store.root, "job")[0].stem]

    played(store, scene)


def test_a_pack_gives_its_space_back_when_the_job_has_long_started(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pack(store, "job", DIGESTS.values())
    monkeypatch.setattr(packs_module, "_KEPT", 0.05)

    async def scene(world: World) -> None:
        pack = await world.read()
        while world.packs.get("job") is not None:
            await asyncio.sleep(0.005)
        while pack.fetch(DIGESTS["k1"]) is not None:
            await asyncio.sleep(0.005)
        assert await world.packs.announced(DIGESTS["k1"]) is None
        await world.read()  # for the next job

    played(store, scene)


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
    write_pack(store, "job", DIGESTS.values())
    monkeypatch.setattr(packs_module, "_KEPT", 3.0)
    monkeypatch.setattr(packs_module, "was_here", lambda *_: True)

    async def scene(world: World) -> None:
        world.packs.begin("job")
        begun = time.monotonic()
        await asyncio.sleep(1.5)
        while (pack := world.packs.get("job")) is None:
            assert await world.packs.announced(DIGESTS["k1"])
        await asyncio.sleep(max(0.0, begun + 3.2 - time.monotonic()))
        assert world.packs.get("job") is pack

    played(store, scene)


def test_one_agent_has_the_packs_of_a_few_profiles_at_most(store: Store) -> None:
    profiles = [f"job{n}" for n in range(6)]
    for profile in profiles:
        write_pack(store, profile, DIGESTS.values())

    async def scene(world: World) -> None:
        for profile in profiles:
            world.packs.begin(profile)
        while any(map(world.packs.is_unread, profiles)):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0)
        assert sum(world.packs.get(profile) is not None for profile in profiles) == 4
        await world.packs.renew(profiles[-1])
        assert world.packs.get(profiles[-1]) is None

    played(store, scene)


def manifest(store: Store, name: str) -> Manifest:
    stated = store.stated(DIGESTS[name])
    assert stated is not None
    return stated[0]


def test_of_what_fits_into_no_pack_the_last_used_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs_module, "MOST_PACKED", 2)

    async def scene(world: World) -> None:
        monkeypatch.setattr(packs_module, "LARGEST_PACKED", manifest(store, "k10").size - 1)
        for name in ("k10", "k1", "k2", "k1", "k3"):
            world.packs.note(manifest(store, name))
        assert list(world.packs.seen) == [DIGESTS["k1"], DIGESTS["k3"]]
        monkeypatch.setattr(packs_module, "LARGEST_PACK", 2 * manifest(store, "k4").size - 1)
        world.packs.note(manifest(store, "k4"))
        assert list(world.packs.seen) == [DIGESTS["k4"]]

    played(store, scene)


def test_an_agent_of_many_jobs_packs_what_the_last_ones_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs_module, "MOST_PACKED", 10)
    monkeypatch.setattr(packing, "_QUIET", 0.0)

    async def scene(world: World) -> None:
        for first in (0, 10):
            world.use(*NAMES[first : first + 10])
            for _ in range(2):
                await asyncio.sleep(0.01)
                world.chore.pulse(time.monotonic() + 1000.0 * (first + 1))
                await world.chore.settled()
        held = world.held()
        assert held is not None
        assert held >= set(NAMES[10:])

    played(store, scene)
