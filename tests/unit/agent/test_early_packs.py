"""Early packs: written when the store is slower than the news, awaited for a bounded time, and never by a job that need not."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kcoord.agent import early_packs
from kcoord.agent.early_packs import EarlyPacks, lease_of
from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Heard, Ready, Wait, Watch
from kcoord.leases.facts import Facts
from kcoord.leases.local import LocalLeases

KEYS = [f"{n:064x}" for n in range(40)]
LEASE = lease_of("job")
WRITER = Wait("writer", 15.0)


class Leases(LocalLeases):
    """Leases with news, which the test says."""

    followers = 100

    def __init__(self) -> None:
        super().__init__(ttl=15.0, limit=900.0, failure_ttl=30.0)
        self.facts = Facts(15.0)
        self.facts.begin()
        self.reached = True

    def heard(self, key: str) -> Heard | None:
        return self.facts.latest(key)

    def ready_keys(self, before: float = math.inf) -> list[str]:
        return self.facts.ready_keys(before)

    def watch(self, key: str) -> Watch:
        return _Watch(self, key)


class _Watch(Watch):
    def __init__(self, leases: Leases, key: str) -> None:
        self._leases, self._key, self._event = leases, key, asyncio.Event()

    async def __aenter__(self) -> Watch:
        if not self._leases.reached:
            raise LeaseUnavailable("it does not answer")
        self._leases.facts.watch(self._key, self._event)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._leases.facts.unwatch(self._key, self._event)

    async def changed(self, timeout: float) -> bool:
        try:
            await asyncio.wait_for(self._event.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        self._event.clear()
        return True


class Packs:
    """A store's newest pack, `newest`, and this node's copy."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.newest: set[str] = set()
        self._copy: set[str] = set()
        self.reads = 0
        self.answers = asyncio.Event()
        self.answers.set()

    def states(self, digest: str) -> bool:
        return digest in self._copy

    async def renew(self, profile: str) -> None:
        assert profile == "job"
        self.reads += 1
        await self.answers.wait()
        self._copy = set(self.newest)


class World:
    def __init__(self, profile: str | None = "job") -> None:
        self.leases, self.packs, self.written = Leases(), Packs(), 0
        self.now = 0.0
        self.early = EarlyPacks(self.leases, profile, self.packs, lambda: time.monotonic() + self.now)
        self.early.write = self._write

    def _write(self) -> None:
        self.written += 1

    def fetches(self, seconds: float, abreast: int = 8) -> None:
        """So many artifacts at a time have come from the store after so many seconds."""
        under_way = [self.early.fetching() for _ in range(abreast)]
        for fetching in under_way:
            fetching.__enter__()
        self.now += seconds
        for fetching in under_way:
            fetching.__exit__(None, None, None)

    def ready(self, count: int = len(KEYS)) -> None:
        for key in KEYS[:count]:
            self.leases.facts.hear(key, Ready("m"), ours=True)

    def has_much_to_fetch(self) -> None:
        self.ready()
        self.fetches(1.0)
        assert self.early.wanted()

    def hear(self, answer: Ready | Wait | None) -> None:
        self.leases.facts.hear(LEASE, answer)

    async def goes_on(self, key: str = KEYS[0]) -> bool:
        """True if a fetch is not held back."""
        asking = self.asks(key)
        await steps()
        return asking.done()

    def asks(self, key: str = KEYS[0]) -> asyncio.Task[bool]:
        return asyncio.create_task(self.early.came(key))


def play(scenario: Callable[[], Awaitable[Any]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 40))


async def steps(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def held_back() -> tuple[World, asyncio.Task[bool]]:
    """A node with much to fetch, and its fetch, which waits for a writer."""
    world = World()
    world.has_much_to_fetch()
    world.hear(WRITER)
    asking = world.asks()
    await steps()
    assert not asking.done()
    return world, asking


# When a pack is worth its writing.


def test_a_pack_is_written_once_the_store_takes_longer_for_what_is_ready_than_a_pack() -> None:
    async def scenario() -> None:
        for seconds, wanted in (
            (0.1, []),
            (0.3, KEYS),
        ):  # 40 artifacts, eight at a time: half a second, and more than one
            world = World()
            world.ready()
            world.fetches(seconds)
            await asyncio.sleep(0.15)
            assert (world.early.wanted(), world.written) == (wanted, len(wanted) // 40)

    play(scenario)


def test_a_node_that_fetches_one_at_a_time_takes_longer_for_all() -> None:
    async def scenario() -> None:
        world = World()
        world.ready()
        world.fetches(0.1, abreast=1)
        assert world.early.wanted() == KEYS

    play(scenario)


def test_the_first_fetches_tell_before_they_end() -> None:
    async def scenario() -> None:
        world = World()
        world.ready()
        with world.early.fetching(), world.early.fetching():
            world.now += 0.3
            await asyncio.sleep(0.15)
            assert world.written == 1

    play(scenario)


def test_what_this_node_has_or_a_pack_states_need_not_be_fetched() -> None:
    async def scenario() -> None:
        world = World()
        world.ready()
        world.fetches(1.0)
        world.packs.seen |= set(KEYS[:20])
        assert world.early.wanted() == KEYS, "other nodes may lack what this one has"
        world.packs.newest = set(KEYS[20:33])
        world.hear(None)
        assert await world.early.came(KEYS[20])
        assert not world.early.wanted()

    play(scenario)


def test_what_jobs_of_other_profiles_compile_is_in_no_pack() -> None:
    async def scenario() -> None:
        world = World()
        world.ready(20)
        for key in KEYS[20:]:
            world.leases.facts.hear(key, Ready("m"))
        world.fetches(1.0)
        assert world.early.wanted() == KEYS[:20]

    play(scenario)


def test_what_does_not_get_into_a_pack_is_no_reason_for_the_next_one() -> None:
    """It is too large, say, or has vanished."""

    async def scenario() -> None:
        world = World()
        world.ready(30)
        world.fetches(1.0)
        world.hear(WRITER)
        asking = world.asks()
        await steps()
        world.packs.newest = {*KEYS[:5], KEYS[29]}
        world.ready()
        world.hear(None)
        assert await asking
        assert world.early.wanted() == KEYS, "ten became READY later"
        world.packs.seen |= set(KEYS[30:33])
        assert world.early.wanted() == []

    play(scenario)


@pytest.mark.parametrize("brought", [5, 0])
def test_what_a_writer_had_no_time_for_is_a_reason_for_the_next_pack_but_not_if_it_brought_nothing(
    brought: int,
) -> None:
    async def scenario() -> None:
        world, asking = await held_back()
        world.packs.newest = set(KEYS[:brought])
        world.hear(None)
        assert await asking is bool(brought)
        world.fetches(1.0)
        assert world.early.wanted() == (KEYS if brought else [])

    play(scenario)


def test_a_writer_leaves_what_it_did_not_come_to_to_the_next_pack() -> None:
    async def scenario() -> None:
        world = World()
        world.has_much_to_fetch()
        world.early.wrote(KEYS, {*KEYS[2:10]})
        world.packs.seen |= set(KEYS[:28])  # a dozen is left, two of which no pack takes
        world.packs.seen -= set(KEYS[:2])
        assert world.early.wanted() == KEYS
        world.packs.seen |= set(KEYS[28:33])
        assert world.early.wanted() == []

    play(scenario)


@pytest.mark.parametrize("why", ["few nodes", "no profile", "few kernels"])
def test_no_pack_is_written_where_it_would_spare_little(why: str) -> None:
    async def scenario() -> None:
        world = World(None if why == "no profile" else "job")
        if why == "few nodes":
            world.leases.followers = 7
        world.ready(7 if why == "few kernels" else 40)
        world.fetches(60.0)
        await asyncio.sleep(0.15)
        assert (world.early.wanted(), world.written) == ([], 0)

    play(scenario)


def test_a_pack_that_takes_long_to_read_is_written_for_more() -> None:
    async def scenario() -> None:
        world = World()
        world.ready()
        world.fetches(1.0)
        assert world.early.wanted()
        world.packs.answers.clear()
        world.hear(None)
        asking = world.asks()
        await steps()
        world.now += 5.0
        world.packs.answers.set()
        await asking
        assert not world.early.wanted(), "some 7 s of fetches, and 5 s for the last pack"

    play(scenario)


# Who waits for a pack.


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_packs, "_HELD_BACK", 0.2)
    monkeypatch.setattr(early_packs, "_READ_WITHIN", 0.2)


def test_a_node_that_has_much_to_fetch_waits_for_the_pack_that_is_being_written() -> None:
    async def scenario() -> None:
        world = World()
        world.has_much_to_fetch()
        world.hear(WRITER)
        asking = [world.asks(KEYS[0]), world.asks(KEYS[1])]
        await steps()
        world.packs.newest = {KEYS[0]}
        assert not any(each.done() for each in asking)
        world.hear(None)
        assert await asyncio.gather(*asking) == [True, False]
        assert world.packs.reads == 1
        assert not await world.early.came(KEYS[1])
        assert world.packs.reads == 1, "there is no newer one"

    play(scenario)


def test_a_node_that_has_fetched_nothing_yet_waits_too() -> None:
    """Its fetches would slow the writer down."""

    async def scenario() -> None:
        world = World()
        world.ready(30)
        world.hear(WRITER)
        asking = world.asks()
        await steps()
        assert not asking.done()
        world.packs.newest = {KEYS[0]}
        world.hear(None)
        assert await asking
        world.ready()
        world.hear(Wait("another", 15.0))
        assert not await world.goes_on(), "nothing says that it did not pay"

    play(scenario)


def test_a_node_that_has_little_to_fetch_waits_for_nothing() -> None:
    async def scenario() -> None:
        world = World()
        world.ready()
        world.fetches(0.05)
        assert not world.early.wanted()
        world.hear(WRITER)
        asking = world.asks()
        await steps()
        assert asking.done()
        assert not await asking

    play(scenario)


def test_nodes_of_a_small_cluster_wait_for_nothing() -> None:
    async def scenario() -> None:
        world = World()
        world.has_much_to_fetch()
        world.leases.followers = 7
        world.hear(WRITER)
        asking = world.asks()
        await steps()
        assert asking.done()

    play(scenario)


def test_a_writer_that_takes_long_is_waited_for_once_and_then_nobody_for_ten_times_as_long(briefly: None) -> None:
    async def scenario() -> None:
        world = World()
        world.has_much_to_fetch()
        world.hear(WRITER)
        assert not await world.early.came(KEYS[0])
        assert await world.goes_on(), "it is late already"
        assert not world.early.wanted(), "another one would be as late"
        world.packs.newest = {KEYS[0]}
        world.hear(None)
        assert await world.early.came(KEYS[0]), "it has come after all"
        world.hear(Wait("another", 15.0))
        assert await world.goes_on()
        world.now += 100.0
        world.fetches(1.0)
        world.hear(WRITER)
        assert not await world.goes_on()

    play(scenario)


def test_a_pack_that_brings_less_than_was_fetched_meanwhile_is_the_last_that_is_waited_for() -> None:
    async def scenario() -> None:
        for brought, goes_on in ((2, True), (30, False)):
            world = World()
            world.ready(30)
            world.fetches(2.0)  # one in 0.25 s
            world.hear(WRITER)
            asking = world.asks()
            await steps()
            world.now += 1.0
            world.packs.newest = set(KEYS[:brought])
            world.hear(None)
            assert await asking
            world.fetches(1.0)
            world.ready()
            world.hear(Wait("another", 15.0))
            assert await world.goes_on() is goes_on

    play(scenario)


def test_a_store_that_takes_no_pack_is_given_none_for_a_while() -> None:
    async def scenario() -> None:
        world = World()
        world.has_much_to_fetch()
        world.early.failed(0.0)
        world.fetches(1.0)
        assert not world.early.wanted()
        world.now += 11.0
        world.fetches(1.0)
        assert world.early.wanted()

    play(scenario)


def test_a_pack_is_read_although_the_next_one_is_being_written() -> None:
    async def scenario() -> None:
        world, asking = await held_back()
        world.packs.newest = {KEYS[0]}
        world.hear(None)
        world.hear(Wait("another", 15.0))
        assert await asking

    play(scenario)


def test_a_pack_that_is_read_from_a_store_that_hangs_is_waited_for_once(briefly: None) -> None:
    async def scenario() -> None:
        world = World()
        world.has_much_to_fetch()
        world.packs.answers.clear()
        world.hear(None)
        assert not await world.early.came(KEYS[0])
        for key in KEYS:
            assert await world.goes_on(key)
        assert world.packs.reads == 1

    play(scenario)


def test_a_node_that_fetches_little_or_nothing_reads_no_pack_for_it() -> None:
    async def scenario() -> None:
        world = World()
        world.ready()
        world.fetches(0.01)
        world.hear(None)
        assert await world.goes_on()
        world.fetches(1.0)
        world.now += 10.0  # its ranks have what they need
        assert await world.goes_on()
        assert not world.early.wanted()
        with world.early.fetching():
            assert not world.early.wanted(), "the pace of then says nothing"
        assert world.packs.reads == 0

    play(scenario)


@pytest.mark.parametrize("fault", ["the lease runs out", "the news breaks off", "Redis does not answer"])
def test_a_writer_of_whom_no_news_comes_holds_nothing_back(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = World()
        world.has_much_to_fetch()
        world.hear(Wait("writer", 0.1 if fault == "the lease runs out" else 15.0))
        world.leases.reached = fault != "Redis does not answer"
        asking = world.asks()
        await steps()
        if fault == "the lease runs out":
            await asyncio.sleep(0.2)
        world.leases.facts.forget()
        assert not await asking
        assert world.packs.reads == 0

    play(scenario)


def test_the_end_of_the_agent_holds_nothing_back() -> None:
    async def scenario() -> None:
        world, asking = await held_back()
        world.early.close()
        assert not await asking
        assert not await world.early.came(KEYS[0])
        assert not world.leases.facts.watched

    play(scenario)
