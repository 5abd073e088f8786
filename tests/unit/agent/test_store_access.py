"""One agent's use of the store: a fault is one line, and its end another, in whichever order those hear of it that met it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kcoord.agent import store_access as shared_store
from kcoord.agent.store_access import SharedStore
from kcoord.artifacts.store import Store
from kcoord.errors import StoreError
from kcoord.files.faults import fault_of
from kcoord.telemetry.events import Notices
from kcoord.testing.stores import manifest_of

CANNOT, BACK = "the store cannot be used", "is back"
VANISHED = "it is missing: create it, or mount it"


class Disk:
    """A store that this test can break, for real: the directory of its artifacts is moved away; and one agent's use of it."""

    def __init__(self, root: Path) -> None:
        self.store, self.notices = Store(root), Notices()
        self.store.open()
        self.shared = SharedStore(self.store, self.notices)
        self._objects = root / "v2" / "objects"

    def break_it(self) -> None:
        self._objects.rename(self._objects.with_name("away"))

    def mend(self) -> None:
        self._objects.with_name("away").rename(self._objects)

    async def publish(self, *, begun: Pause | None = None, ending: Pause | None = None) -> bool:
        """Whether an artifact got into the store; held up before the disk is asked, or after it has answered."""

        def work(store: Store) -> bool:
            if begun is not None:
                begun.here()
            try:
                contents = {"kernel": b"code"}
                store.publish(manifest_of(contents), contents)
            finally:
                if ending is not None:
                    ending.here()
            return True

        return await self.shared.use(work, publishes=True) is True

    @property
    def told(self) -> list[str]:
        return [BACK if BACK in line else CANNOT for line in self.notices.since(0)[0]]


class Pause:
    """Where a thread of the store waits for the test."""

    def __init__(self) -> None:
        self._reached, self._over = threading.Event(), threading.Event()

    def here(self) -> None:
        self._reached.set()
        assert self._over.wait(20)

    async def reached(self) -> None:
        await asyncio.to_thread(self._reached.wait, 20)

    def end(self) -> None:
        self._over.set()


async def until(condition: Callable[[], bool]) -> None:
    async def look() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(look(), 20)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested is that the probe finds out, not how long a second is."""
    monkeypatch.setattr(shared_store, "_FIRST_PROBE", 0.02)
    monkeypatch.setattr(shared_store, "_SLOWEST_PROBE", 0.05)


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_store, "_FIRST_PROBE", 1000.0)


def play(tmp_path: Path, scenario: Callable[[Disk], Awaitable[None]]) -> Disk:
    async def played() -> Disk:
        disk = Disk(tmp_path / "store")
        try:
            await asyncio.wait_for(scenario(disk), 40)
        finally:
            disk.shared.close()
        return disk

    return asyncio.run(played())


@pytest.mark.usefixtures("no_probe")
def test_what_began_before_a_fault_and_is_done_during_it_does_not_end_it(tmp_path: Path) -> None:
    async def scenario(disk: Disk) -> None:
        pause = Pause()
        early = asyncio.create_task(disk.publish(ending=pause))
        await pause.reached()
        disk.break_it()
        assert not await disk.publish()
        pause.end()
        assert await early
        assert disk.shared.faulty
        assert not await disk.publish()
        assert disk.told == [CANNOT]
        disk.mend()
        assert await disk.publish(), "that began during the fault, and is its end"
        assert disk.told == [CANNOT, BACK]

    play(tmp_path, scenario)


@pytest.mark.usefixtures("no_probe")
def test_a_publish_that_finds_nothing_to_publish_does_not_end_a_fault(tmp_path: Path) -> None:
    """What it was to publish is gone from this node: it has not been to the store."""

    async def scenario(disk: Disk) -> None:
        disk.break_it()
        assert not await disk.publish()
        assert await disk.shared.use(lambda store: None, publishes=True) is None
        assert disk.shared.faulty
        assert not await disk.publish()
        assert disk.told == [CANNOT]

    play(tmp_path, scenario)


def test_what_began_during_a_fault_and_fails_after_its_end_is_no_new_fault(tmp_path: Path) -> None:
    async def scenario(disk: Disk) -> None:
        pause = Pause()
        disk.break_it()
        late = asyncio.create_task(disk.publish(ending=pause))
        await pause.reached()
        assert not await disk.publish()
        disk.mend()
        await until(lambda: not disk.shared.faulty)
        pause.end()
        assert not await late
        assert not disk.shared.faulty
        assert await disk.publish()
        assert disk.told == [CANNOT, BACK]

    play(tmp_path, scenario)


def test_a_store_that_failed_for_a_straggler_is_looked_at_once_more(tmp_path: Path) -> None:
    """It may have met the next fault, and nobody else may be on the way there for an hour."""

    async def scenario(disk: Disk) -> None:
        pause = Pause()
        disk.break_it()
        assert not await disk.publish()
        late = asyncio.create_task(disk.publish(begun=pause))
        await pause.reached()
        disk.mend()
        await until(lambda: not disk.shared.faulty)
        disk.break_it()
        pause.end()
        assert not await late
        await until(lambda: disk.shared.faulty)
        assert disk.told == [CANNOT, BACK, CANNOT]

    play(tmp_path, scenario)


def test_a_probe_that_looked_before_a_fault_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(disk: Disk) -> None:
        pause, check = Pause(), disk.store.check

        def slowly() -> None:
            monkeypatch.setattr(disk.store, "check", check)
            check()
            pause.here()

        disk.break_it()
        assert not await disk.publish()
        disk.mend()
        monkeypatch.setattr(disk.store, "check", slowly)
        await pause.reached()  # it has found the store well
        assert await disk.publish()  # and so has this one, which is faster
        disk.break_it()
        assert not await disk.publish()
        pause.end()
        await asyncio.sleep(0.2)  # the probe has looked again, a few times
        assert disk.shared.faulty
        assert disk.told == [CANNOT, BACK, CANNOT]

    play(tmp_path, scenario)


def test_threads_that_fail_at_once_while_the_probe_looks_tell_one_line_for_each_fault(tmp_path: Path) -> None:
    """Thirty are at the store at every moment; it breaks and is mended under them."""

    async def scenario(disk: Disk) -> None:
        over = False

        async def publishing() -> None:
            while not over:
                await disk.publish()

        publishers = [asyncio.create_task(publishing()) for _ in range(30)]
        for faults in range(1, 6):
            disk.break_it()
            await until(lambda faults=faults: disk.told.count(CANNOT) == faults)  # type: ignore[misc]
            await asyncio.sleep(0.1)
            disk.mend()
            await until(lambda faults=faults: disk.told.count(BACK) == faults)  # type: ignore[misc]
            await asyncio.sleep(0.1)
            assert not disk.shared.faulty
            assert disk.told == [CANNOT, BACK] * faults
        over = True
        await asyncio.gather(*publishers)

    play(tmp_path, scenario)


@pytest.mark.usefixtures("no_probe")
def test_what_else_writes_to_the_store_does_not_tell_a_later_fault_again(tmp_path: Path) -> None:
    """Time lines and profiles are written there too, and name a fault by its remedy."""

    async def scenario(disk: Disk) -> None:
        def full(store: Store) -> None:
            raise StoreError(f"{store.root}: it is full: free space", "it is full: free space")

        disk.break_it()
        assert not await disk.publish()
        disk.mend()
        assert await disk.publish()
        await disk.shared.use(full)
        error = StoreError("the time line", "it is full: free space")
        assert not disk.notices.tell("the time line stays here", about=fault_of(disk.store.root, error))
        assert disk.told == [CANNOT, BACK, CANNOT]

    play(tmp_path, scenario)


def test_of_those_who_ask_whether_a_store_that_hangs_takes_artifacts_one_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look has a thread of its own, which the store keeps."""
    monkeypatch.setattr(shared_store, "_AT_ONCE", 0.05)

    async def scenario(disk: Disk) -> None:
        hold, looks = Pause(), 0

        def look() -> None:
            nonlocal looks
            looks += 1
            hold.here()

        monkeypatch.setattr(disk.store, "check", look)
        assert await asyncio.gather(*(disk.shared.takes_artifacts() for _ in range(5))) == [True] * 5
        assert await disk.shared.takes_artifacts()
        assert looks == 1
        hold.end()
        await until(lambda: disk.shared._look is not None and disk.shared._look.done())
        assert await disk.shared.takes_artifacts()
        assert looks == 2

    play(tmp_path, scenario)


# Turns.


async def crowd(disk: Disk, hold: Pause) -> list[asyncio.Task[None]]:
    """As many as the store takes at a time, held up there."""
    there = threading.Semaphore(0)

    def held(store: Store) -> None:
        there.release()
        hold.here()

    crowd = [asyncio.create_task(disk.shared.use(held)) for _ in range(shared_store._ABREAST)]
    for _ in crowd:
        assert await asyncio.to_thread(there.acquire, timeout=20)
    return crowd


@pytest.mark.usefixtures("no_probe")
def test_who_had_no_turn_goes_without_and_says_nothing_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others were there all the time: it is slow, and may be well."""
    monkeypatch.setattr(shared_store, "_TURN_WITHIN", 0.05)

    async def scenario(disk: Disk) -> None:
        hold = Pause()
        others = await crowd(disk, hold)
        published = asyncio.create_task(disk.publish())
        assert await disk.shared.use(lambda store: "fetched") is None
        assert not disk.shared.faulty
        assert not published.done(), "nobody waits for it, and it is not to stay here"
        hold.end()
        assert await published
        await asyncio.gather(*others)
        assert await disk.shared.use(lambda store: "fetched") == "fetched"

    assert "is slow" in "".join(play(tmp_path, scenario).notices.since(0)[0])


def test_those_behind_a_crowd_that_hangs_have_their_turn_if_the_store_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a part of it hangs: another server has the rest."""
    monkeypatch.setattr(shared_store, "PATIENCE", 0.3)

    async def scenario(disk: Disk) -> None:
        hold = Pause()
        others = await crowd(disk, hold)
        behind = [asyncio.create_task(disk.shared.use(lambda store: "fetched")) for _ in range(20)]
        assert await asyncio.gather(*others) == [None] * len(others)
        assert await asyncio.gather(*behind) == ["fetched"] * 20
        assert disk.told == [CANNOT, BACK]
        hold.end()
        await until(lambda: not disk.shared._io.stuck)

    play(tmp_path, scenario)


def test_those_behind_a_crowd_that_hangs_go_without_if_the_store_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_store, "PATIENCE", 0.3)
    monkeypatch.setattr(shared_store, "_GRACE", 0.1)

    async def scenario(disk: Disk) -> None:
        hold = Pause()
        monkeypatch.setattr(disk.store, "check", hold.here)
        others = await crowd(disk, hold)
        behind = [asyncio.create_task(disk.shared.use(lambda store: "fetched")) for _ in range(20)]
        behind += [asyncio.create_task(disk.shared.use(lambda store: "published", publishes=True))]
        assert {*await asyncio.gather(*others), *await asyncio.gather(*behind)} == {None}
        assert disk.shared.faulty
        hold.end()
        await until(lambda: not disk.shared.faulty)
        assert await disk.shared.use(lambda store: "fetched") == "fetched"

    play(tmp_path, scenario)


@pytest.mark.usefixtures("no_probe")
def test_of_those_in_a_hurry_one_waits_behind_a_crowd_and_the_others_do_not(tmp_path: Path) -> None:
    """Ranks ask for the same choice one after the other: their waits would add up."""

    async def scenario(disk: Disk) -> None:
        hold = Pause()
        others = await crowd(disk, hold)
        assert await disk.shared.use(lambda store: "found", 0.05) is None
        assert await disk.shared.use(lambda store: "found", 1000.0) is None
        hold.end()
        await asyncio.gather(*others)
        await until(lambda: not disk.shared._overdue)
        assert await disk.shared.use(lambda store: "found", 20.0) == "found"

    play(tmp_path, scenario)


@pytest.mark.usefixtures("no_probe")
def test_who_is_in_a_hurry_does_not_close_the_store_for_others(tmp_path: Path) -> None:
    async def scenario(disk: Disk) -> None:
        hold = Pause()
        assert await disk.shared.use(lambda store: hold.here(), 0.1) is None
        assert not disk.shared.faulty
        assert await disk.publish()
        assert await disk.shared.use(lambda store: "found", 20.0) is None, "it is not waited for again and again"
        hold.end()
        await until(lambda: not disk.shared._overdue)
        assert await disk.shared.use(lambda store: "found", 20.0) == "found"

    assert "has not answered for 0.1 s" in "".join(play(tmp_path, scenario).notices.since(0)[0])


def test_what_nobody_waits_for_any_more_still_says_that_the_store_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_store, "PATIENCE", 0.3)

    async def scenario(disk: Disk) -> None:
        hold = Pause()
        monkeypatch.setattr(disk.store, "check", hold.here)
        assert await disk.shared.use(lambda store: hold.here(), 0.05) is None
        await until(lambda: disk.shared.faulty)
        hold.end()
        await until(lambda: not disk.shared.faulty)

    play(tmp_path, scenario)


def test_a_store_that_keeps_too_many_threads_is_left_alone_until_it_gives_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_store, "PATIENCE", 0.1)
    monkeypatch.setattr(shared_store, "_MOST_STUCK", 1)

    async def scenario(disk: Disk) -> None:
        hold, looked, check = Pause(), 0, disk.store.check

        def look() -> None:
            nonlocal looked
            check()
            looked += 1

        monkeypatch.setattr(disk.store, "check", look)
        assert await disk.shared.use(lambda store: hold.here()) is None
        await until(lambda: looked > 2)
        assert disk.shared.faulty
        hold.end()
        await until(lambda: not disk.shared.faulty)

    play(tmp_path, scenario)
