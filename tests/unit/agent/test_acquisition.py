"""The leases that an agent's tasks leave in the lease service."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kcoord.agent import flights as act
from kcoord.agent.acquisition import Acquisition
from kcoord.agent.expectations import Expectations
from kcoord.agent.flights import Flights, State
from kcoord.agent.packs import UsedArtifacts
from kcoord.agent.tiers import Tiers
from kcoord.artifacts import local
from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.artifacts.store import Store
from kcoord.errors import LeaseUnavailable, StoreError
from kcoord.leases.base import Answer, Failed, Lease, Ready, Wait, within
from kcoord.leases.local import LocalLeases
from kcoord.telemetry.events import Notices
from tests.support.agents import key_of, stage
from tests.support.signing import OURS, THEIRS, opened

KEY = "key"
_HEARERS: dict[str, Any] = {"expectations": Expectations(0.0, 0.0), "used": UsedArtifacts(Path("/"))}


class Tasks(Acquisition):
    """An agent's acquisition, and the tiers that it uses."""

    tiers: Tiers

    def carry_out(self, actions: list[act.Action]) -> None:
        for action in actions:
            if not isinstance(action, act.Reply):
                self.start(action)

    async def end(self) -> None:
        await self.drain(1.0)
        self.tiers.close()


def new_flights() -> Flights:
    return Flights(limit=900.0, failure_ttl=30.0, max_wait=300.0)


def new_leases() -> LocalLeases:
    return LocalLeases(15.0, 900.0, 30.0)


def tasks_of(
    flights: Flights,
    leases: LocalLeases,
    answered: list[act.Reply] | None = None,
    *,
    ttl: float = 15.0,
    notices: Notices | None = None,
    store: Store | None = None,
) -> Tasks:
    """Carries out all actions but answers to ranks, which go to `answered`."""

    def report(actions: list[act.Action]) -> None:
        for action in actions:
            if not isinstance(action, act.Reply):
                tasks.start(action)
            elif answered is not None:
                answered.append(action)

    notices = notices or Notices()
    tiers = Tiers(store, None, notices, **_HEARERS)
    tasks = Tasks(leases, tiers, flights, notices, agent_id="us", ttl=ttl, now=time.monotonic, report=report)
    tasks.tiers = tiers
    return tasks


def claimant(n: int = 1, *, waits: bool = True, slow_after: float = math.inf) -> act.Claimant:
    deadline = time.monotonic() + 60
    return act.Claimant(n, n, KEY, f"/home/{n}", f"rank {n}", deadline, waits=waits, slow_after=lambda: slow_after)


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


async def leader_of(flights: Flights, tasks: Tasks) -> str:
    """A rank leads `KEY`, by its node's lease; its token."""
    tasks.carry_out(flights.claim(claimant(), time.monotonic()))
    await until(lambda: (flight := flights.get(KEY)) is not None and flight.state is State.LEADING)
    flight = flights.get(KEY)
    assert flight is not None
    assert flight.leader is not None
    return flight.leader.token


async def test_a_leader_s_lease_is_renewed_until_it_fails_and_other_nodes_hear_of_that() -> None:
    leases, flights = LocalLeases(0.2, 900.0, 30.0), new_flights()
    tasks = tasks_of(flights, leases, ttl=0.2)
    token = await leader_of(flights, tasks)
    assert tasks.held == 1
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        assert isinstance(await leases.acquire(KEY, "theirs", "another node"), Wait)
        await asyncio.sleep(0.02)
    tasks.carry_out(flights.failed(KEY, token, "ptxas: no", "rank 1", time.monotonic()))
    await until(lambda: not tasks.busy)
    assert tasks.held == 0
    assert await leases.acquire(KEY, "theirs", "another node") == Failed("ptxas: no", "rank 1")
    await tasks.end()


async def test_a_lease_whose_artifact_stays_on_this_node_is_given_back() -> None:
    """There is no store, so there is nothing that other nodes could fetch."""
    leases, flights = new_leases(), new_flights()
    tasks = tasks_of(flights, leases)
    token = await leader_of(flights, tasks)
    assert flights.landing(KEY, token)
    tasks.carry_out(flights.landed(KEY, "/home/1"))
    await until(lambda: not tasks.busy)
    assert tasks.held == 0
    assert isinstance(await leases.acquire(KEY, "theirs", "another node"), Lease)
    await tasks.end()


async def test_a_manifest_that_is_in_the_store_already_is_announced_at_once() -> None:
    leases, flights = new_leases(), new_flights()
    tasks = tasks_of(flights, leases)
    await leader_of(flights, tasks)
    tasks.start(act.Upload(KEY, 1, "/home/1", "a manifest"))
    await until(lambda: not tasks.busy)
    assert tasks.held == 0
    assert await leases.acquire(KEY, "theirs", "another node") == Ready("a manifest")
    tasks.start(act.Upload("another key", 0, "/home/1", "its manifest"))  # nobody holds its lease
    await until(lambda: not tasks.busy)
    assert await leases.acquire("another key", "theirs", "another node") == Ready("its manifest")
    await tasks.end()


async def test_a_flight_that_ends_while_it_waits_for_another_node_holds_nothing_and_stops_asking() -> None:
    leases, flights = new_leases(), new_flights()
    tasks = tasks_of(flights, leases)
    theirs = await leases.acquire(KEY, "theirs", "another node")
    assert isinstance(theirs, Lease)
    tasks.carry_out(flights.claim(claimant(), time.monotonic()))
    await until(lambda: leases._watchers)
    tasks.carry_out(flights.gone(1, time.monotonic()))
    await until(lambda: not tasks.busy)
    assert not leases._watchers
    await theirs.release()
    assert not leases._held
    assert isinstance(await leases.acquire(KEY, "third", "another node"), Lease)
    await tasks.end()


async def test_a_claim_that_does_not_wait_asks_once() -> None:
    asked: list[str] = []

    class Leases(LocalLeases):
        async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
            asked.append(token)
            return await super().acquire(key, token, holder, void=void)

    leases, flights = Leases(15.0, 900.0, 30.0), new_flights()
    answered: list[act.Reply] = []
    tasks = tasks_of(flights, leases, answered)
    assert isinstance(await leases.acquire(KEY, "theirs", "another node"), Lease)
    tasks.carry_out(flights.claim(claimant(waits=False), time.monotonic()))
    await until(lambda: answered and not tasks.busy)
    assert len(asked) == 2, "theirs, and ours once"
    assert not leases._watchers
    assert flights.get(KEY) is None
    await tasks.end()


async def test_without_a_lease_service_ranks_of_this_node_go_ahead_and_that_is_told_once() -> None:
    class Away(LocalLeases):
        async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
            raise LeaseUnavailable("it is away")

    leases, flights, notices = Away(15.0, 900.0, 30.0), new_flights(), Notices()
    tasks = tasks_of(flights, leases, notices=notices)
    await leader_of(flights, tasks)
    assert tasks.held == 0
    assert [line for line in notices.since(0)[0] if "no lease service can be used (it is away)" in line]
    await tasks.end()


async def test_an_error_that_nobody_foresaw_ends_the_flight_and_gives_its_lease_back() -> None:
    leases, flights, notices = new_leases(), new_flights(), Notices()
    answered: list[act.Reply] = []
    tasks = tasks_of(flights, leases, answered, notices=notices)

    async def ill(digest: str, home: Path, announced: str | None) -> str:
        raise ZeroDivisionError("look")

    tasks.tiers.from_store = ill  # type: ignore[method-assign]
    tasks.carry_out(flights.claim(claimant(), time.monotonic()))
    await until(lambda: answered and not tasks.busy)
    assert flights.get(KEY) is None
    assert not leases._held
    assert any("please report it: ZeroDivisionError: look" in line for line in notices.since(0)[0])
    await tasks.end()


@pytest.mark.parametrize("is_there", [False, True], ids=["the store has it not", "the store has it"])
async def test_an_artifact_that_came_from_another_store_is_not_signed_anew(tmp_path: Path, is_there: bool) -> None:
    """Its signer may be trusted no more: a leader whose files lost the race against that copy hands in nothing."""
    key, home = key_of("k"), tmp_path / "local" / "home"
    theirs, store = opened(tmp_path / "theirs", THEIRS), opened(tmp_path / "store", OURS)
    made = local.publish_local(stage(tmp_path / "there"), tmp_path / "there", key, 0.5, Origin.here(1, 0, ""))
    contents = local.read_contents(made)
    theirs.publish(made.manifest, contents)
    before = store.publish(made.manifest, contents) if is_there else None
    fetched = theirs.fetch(key.digest)
    assert fetched is not None
    local.install(fetched[0], fetched[1], home)
    leases, flights = new_leases(), new_flights()
    tasks = tasks_of(flights, leases, store=store)
    tasks.start(act.Upload(key.digest, 0, str(home)))
    await until(lambda: not tasks.busy)
    stated = store.stated(key.digest)
    assert (stated and stated[1]) == before
    answer = await leases.acquire(key.digest, "theirs", "another node")
    assert answer == Ready(before) if before is not None else isinstance(answer, Lease)
    await tasks.end()


async def test_an_agent_that_ends_does_not_wait_for_other_nodes() -> None:
    leases, flights = new_leases(), new_flights()
    tasks = tasks_of(flights, leases)
    assert isinstance(await leases.acquire(KEY, "theirs", "another node"), Lease)
    tasks.carry_out(flights.claim(claimant(), time.monotonic()))
    await until(lambda: leases._watchers)
    await within(10.0, tasks.drain(60.0))


async def test_an_agent_that_ends_gives_back_its_own_leases_and_no_others() -> None:
    leases, flights = new_leases(), new_flights()
    tasks = tasks_of(flights, leases)
    await leader_of(flights, tasks)
    assert isinstance(await leases.acquire("collection", "us.gc", "us"), Lease)
    await tasks.end()
    assert list(leases._held) == ["collection"]
    assert isinstance(await leases.acquire(KEY, "theirs", "another node"), Lease)


# Leads without the lease: no other node is to wait for what does not get into the store.


class FullStore(Store):
    """Takes no artifact, as long as it is `full`."""

    full = True

    def publish(self, manifest: Manifest, contents: dict[str, bytes]) -> str:
        self.check()
        return super().publish(manifest, contents)

    def check(self) -> None:
        if self.full:
            raise StoreError(f"{self.root}: it is full", "free some space")


async def found_full(tasks: Tasks, home: Path) -> None:
    """The agent has met the full store."""
    tasks.start(act.Upload(key_of("k").digest, 0, str(at_home(home))))
    await until(lambda: tasks.tiers.store.faulty and not tasks.busy)


def full_store(root: Path) -> FullStore:
    store = FullStore(root)
    store.open()
    return store


@pytest.mark.parametrize("full", [True, False])
async def test_who_gets_the_lease_after_a_wait_keeps_it_if_its_store_takes_artifacts(
    tmp_path: Path, full: bool
) -> None:
    """The other node may have given up since the store is full, which this one has not met."""
    store, leases, flights = full_store(tmp_path), new_leases(), new_flights()
    store.full = full
    tasks = tasks_of(flights, leases, store=store)
    theirs = await leases.acquire(KEY, "theirs", "another node")
    assert isinstance(theirs, Lease)
    leading = asyncio.create_task(leader_of(flights, tasks))
    await until(lambda: leases._watchers)
    assert not tasks.tiers.store.faulty
    await theirs.release()
    await leading
    assert (tasks.held, tasks.tiers.store.faulty) == ((0, True) if full else (1, False))
    await tasks.end()


@pytest.mark.parametrize("full", [True, False])
async def test_a_ready_that_a_node_with_a_full_store_cannot_use_stays_true_for_others(
    tmp_path: Path, full: bool
) -> None:
    store, leases, flights = full_store(tmp_path / "store"), new_leases(), new_flights()
    tasks = tasks_of(flights, leases, store=store)
    if full:
        await found_full(tasks, tmp_path / "local" / "k")
    await leases.ready(KEY, "a manifest")
    await leader_of(flights, tasks)
    assert tasks.held == (0 if full else 1)
    answer = await leases.acquire(KEY, "theirs", "another node")
    assert answer == Ready("a manifest") if full else isinstance(answer, Wait)
    await tasks.end()


async def test_an_artifact_that_a_key_unknown_here_has_signed_stays_ready_for_others(tmp_path: Path) -> None:
    key, home = key_of("k"), tmp_path / "local" / "k"
    made = local.open_artifact(at_home(tmp_path / "there" / "k"))
    assert made is not None
    manifest = opened(tmp_path / "store", THEIRS).publish(made.manifest, local.read_contents(made))
    leases, flights = new_leases(), new_flights()
    await leases.ready(key.digest, manifest)
    tasks = tasks_of(flights, leases, store=opened(tmp_path / "store", OURS))
    tasks.carry_out(flights.claim(replace(claimant(), key=key.digest, home=str(home)), time.monotonic()))
    await until(lambda: (flight := flights.get(key.digest)) is not None and flight.state is State.LEADING)
    assert not home.exists()
    assert tasks.held == 0
    assert await leases.acquire(key.digest, "theirs", "another node") == Ready(manifest)
    await tasks.end()


async def test_a_second_ready_that_proves_untrue_ends_in_a_compile_without_a_lease(tmp_path: Path) -> None:
    class Insists(LocalLeases):
        async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
            voids.append(void)
            return Ready(f"manifest {len(voids)}")

    voids: list[str | None] = []
    store, flights = Store(tmp_path / "store"), new_flights()
    store.open()
    tasks = tasks_of(flights, Insists(15.0, 900.0, 30.0), store=store)
    await leader_of(flights, tasks)
    assert tasks.held == 0
    await tasks.end()
    assert voids == [None, "manifest 1"]


async def test_a_store_that_lacks_what_other_nodes_have_published_is_told_once(tmp_path: Path) -> None:
    """Their KCOORD_STORE is another one."""

    class OfAnotherStore(LocalLeases):
        async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
            return Ready("theirs") if void is None else Lease(self, key, token, holder, 900.0)

    store, flights, notices = Store(tmp_path / "store"), new_flights(), Notices()
    store.open()
    tasks = tasks_of(flights, OfAnotherStore(15.0, 900.0, 30.0), store=store, notices=notices)
    for number, name in enumerate(
        ("k", "k", "k", "l", "m", "n"), 1
    ):  # one alone, again and again, may have been removed
        claim = replace(claimant(number), key=key_of(name).digest)
        tasks.carry_out(flights.claim(claim, 0.0))
        await until(lambda: (flight := flights.get(claim.key)) is not None and flight.state is State.LEADING)  # noqa: B023
        tasks.carry_out(flights.gone(claim.owner, 0.0))
        lines, _ = notices.since(0)
        assert [f"the store {store.root} lacks kernels" in line for line in lines] == [True] * (number >= 5), lines
    await tasks.end()


# Copies between homes of the local tier.


def bringing(tasks: Tasks, there: Path, home: Path) -> bool | None:
    async def bring() -> bool | None:
        try:
            return await tasks.tiers.bring_home(key_of("k").digest, there, home)
        finally:
            await tasks.end()

    return asyncio.run(bring())


def tasks_with(notices: Notices | None = None) -> Tasks:
    return tasks_of(
        new_flights(),
        new_leases(),
        notices=notices or Notices(),
    )


def at_home(home: Path) -> Path:
    local.publish_local(stage(home), home, key_of("k"), 0.5, Origin.here(1, 0, ""))
    return home


def test_what_is_at_home_already_is_not_copied(tmp_path: Path) -> None:
    home = at_home(tmp_path / "two" / "k")
    assert bringing(tasks_with(), tmp_path / "vanished", home) is True


def test_a_copy_of_what_has_vanished_is_asked_for_again(tmp_path: Path) -> None:
    assert bringing(tasks_with(), tmp_path / "vanished", tmp_path / "two" / "k") is None


@pytest.mark.parametrize("where", ["one", "two"])
def test_nothing_is_copied_from_or_to_where_others_may_write(tmp_path: Path, where: str) -> None:
    there, home, notices = at_home(tmp_path / "one" / "k"), tmp_path / "two" / "k", Notices()
    home.parent.mkdir()
    (tmp_path / where).chmod(0o777)
    assert bringing(tasks_with(notices), there, home) is False
    assert not home.exists()
    assert [line for line in notices.since(0)[0] if str(tmp_path / where) in line]


@pytest.mark.parametrize("required", [True, False])
async def test_where_signatures_are_required_only_homes_that_this_agent_has_filled_are_copied(
    tmp_path: Path, required: bool
) -> None:
    """Also without a store. Another agent, with less trust, may have filled the home of a rank."""
    tiers, key = Tiers(None, tmp_path, Notices(), **_HEARERS, required=required), key_of("k")
    theirs, ours = at_home(tmp_path / "theirs" / "k"), tmp_path / "ours" / "k"
    assert await tiers.bring_home(key.digest, theirs, tmp_path / "one" / "k") is not required
    staging = stage(ours)
    await tiers.publish_locally(staging, ours, key, 0.5, Origin.here(1, 0, ""))
    assert await tiers.bring_home(key.digest, ours, tmp_path / "two" / "k")
    tiers.close()


# The end.


class SlowStore(Store):
    """Publishes once it `may`."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.publishes, self.may = threading.Event(), threading.Event()

    def publish(self, manifest: Manifest, contents: dict[str, bytes]) -> str:
        self.publishes.set()
        assert self.may.wait(20)
        return super().publish(manifest, contents)


async def publishing(tasks: Tasks, store: SlowStore, home: Path) -> None:
    """An artifact is on its way into the store."""
    tasks.start(act.Upload(key_of("k").digest, 0, str(at_home(home))))
    await until(store.publishes.is_set)


async def test_an_agent_that_ends_finishes_what_it_publishes(tmp_path: Path) -> None:
    store = SlowStore(tmp_path / "store")
    store.open()
    leases = new_leases()
    tasks = tasks_of(new_flights(), leases, store=store)
    await publishing(tasks, store, tmp_path / "local" / "k")
    assert tasks.uploads == 1
    draining = asyncio.create_task(tasks.drain(20.0))
    await asyncio.sleep(0)
    store.may.set()
    await within(20.0, draining)
    stated = store.stated(key_of("k").digest)
    assert stated is not None
    assert await leases.acquire(key_of("k").digest, "theirs", "another node") == Ready(stated[1])
    assert tasks.uploads == 0


async def test_an_agent_that_ends_does_not_wait_longer_than_it_may_for_its_store_and_its_leases(tmp_path: Path) -> None:
    class Hangs(LocalLeases):
        async def release(self, lease: Lease) -> bool:
            released.set()
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    released = threading.Event()
    store, leases, flights = SlowStore(tmp_path / "store"), Hangs(15.0, 900.0, 30.0), new_flights()
    store.open()
    tasks = tasks_of(flights, leases, store=store)
    await leader_of(flights, tasks)
    await publishing(tasks, store, tmp_path / "local" / "k")
    await within(10.0, tasks.drain(0.05, 0.05))
    assert released.is_set()
    await until(lambda: not [task for task in asyncio.all_tasks() if "_give_back" in repr(task.get_coro())])
    store.may.set()


async def test_after_its_end_nothing_is_begun(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.open()
    flights, answered = new_flights(), list[act.Reply]()
    tasks = tasks_of(flights, new_leases(), answered, store=store)
    await tasks.end()
    tasks.carry_out(flights.claim(claimant(), time.monotonic()))
    await asyncio.sleep(0.02)
    assert not answered
    assert not tasks.busy
    assert await tasks.tiers.store.use(lambda store: 1) is None
    with pytest.raises(RuntimeError):
        await tasks.tiers.locally(lambda: 1)
