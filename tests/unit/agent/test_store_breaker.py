"""One agent's use of the store: an outage is one line, and its end another; a store that hangs holds up nobody."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kcoord.agent.store_breaker import StoreBreaker
from kcoord.artifacts.store import Store
from kcoord.telemetry.events import Notices
from kcoord.testing.stores import manifest_of

CANNOT, BACK = "the store cannot be used", "is back"
NEVER = (1000.0, 1000.0)  # probes
ABREAST = 8


class Disk:
    """A store that this test can break, for real: the directory of its artifacts is moved away; and one agent's use of it."""

    def __init__(self, root: Path, **bounds: Any) -> None:
        self.store, self.notices = Store(root), Notices()
        self.store.open()
        self.breaker = StoreBreaker(self.store, self.notices, **{"probes": (0.02, 0.05), **bounds})
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

        return await self.breaker.use(work) is True

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


def play(tmp_path: Path, scenario: Callable[[Disk], Awaitable[None]], **bounds: Any) -> Disk:
    async def played() -> Disk:
        disk = Disk(tmp_path / "store", **bounds)
        try:
            await asyncio.wait_for(scenario(disk), 40)
        finally:
            disk.breaker.close()
        return disk

    return asyncio.run(played())


# Outages.


def test_a_use_that_works_does_not_end_an_outage(tmp_path: Path) -> None:
    """It may have begun before, or have read what can still be read."""

    async def scenario(disk: Disk) -> None:
        pause = Pause()
        early = asyncio.create_task(disk.publish(ending=pause))
        await pause.reached()
        disk.break_it()
        assert not await disk.publish()
        pause.end()
        assert await early
        assert await disk.breaker.use(lambda store: "read") == "read"
        assert disk.breaker.faulty
        assert not await disk.publish()
        assert disk.told == [CANNOT]

    play(tmp_path, scenario, probes=NEVER)


def test_a_use_that_began_in_an_outage_and_fails_after_its_end_begins_no_other(tmp_path: Path) -> None:
    async def scenario(disk: Disk) -> None:
        pause = Pause()
        disk.break_it()
        late = asyncio.create_task(disk.publish(ending=pause))
        await pause.reached()
        assert not await disk.publish()
        disk.mend()
        await until(lambda: not disk.breaker.faulty)
        pause.end()
        assert not await late
        assert not disk.breaker.faulty
        assert await disk.publish()
        assert disk.told == [CANNOT, BACK]

    play(tmp_path, scenario)


def test_threads_that_fail_at_once_while_the_probe_looks_begin_one_outage_for_each_fault(tmp_path: Path) -> None:
    """Thirty are at the store at every moment; it breaks and is mended under them."""

    async def scenario(disk: Disk) -> None:
        over = False

        async def publishing() -> None:
            while not over:
                await disk.publish()

        publishers = [asyncio.create_task(publishing()) for _ in range(30)]
        for faults in range(1, 6):
            disk.break_it()
            await until(lambda faults=faults: disk.breaker.changes == 2 * faults - 1)  # type: ignore[misc]
            await asyncio.sleep(0.1)
            disk.mend()
            await until(lambda faults=faults: disk.breaker.changes == 2 * faults)  # type: ignore[misc]
            await asyncio.sleep(0.1)
            assert not disk.breaker.faulty
            assert disk.told == [CANNOT, BACK]
        over = True
        await asyncio.gather(*publishers)

    play(tmp_path, scenario)


# A store that hangs.


async def crowd(disk: Disk, hold: Pause, count: int = ABREAST) -> list[asyncio.Task[None]]:
    """As many as the store takes at a time, held up there."""
    there = threading.Semaphore(0)

    def held(store: Store) -> None:
        there.release()
        hold.here()

    crowd = [asyncio.create_task(disk.breaker.use(held)) for _ in range(count)]
    for _ in crowd:
        assert await asyncio.to_thread(there.acquire, timeout=20)
    return crowd


def test_a_store_that_hangs_holds_up_neither_the_loop_nor_those_behind(tmp_path: Path) -> None:
    """Each waits for one use's patience at most: those that have no thread yet get none, and later ones return at once."""

    async def scenario(disk: Disk) -> None:
        hold, began = Pause(), time.monotonic()
        others = await crowd(disk, hold)
        behind = [asyncio.create_task(disk.breaker.use(lambda store: "fetched")) for _ in range(100)]
        behind += [asyncio.create_task(disk.publish())]
        assert {*await asyncio.gather(*others), *await asyncio.gather(*behind)} == {None, False}
        assert time.monotonic() - began < 5, "nobody waited for the turn of another that hangs as well"
        assert disk.breaker.faulty
        began = time.monotonic()
        assert [await disk.breaker.use(lambda store: "fetched") for _ in range(100)] == [None] * 100
        assert time.monotonic() - began < 0.5
        assert disk.told == [CANNOT]
        hold.end()

    play(tmp_path, scenario, patience=0.5, probes=NEVER)


def test_threads_that_hang_leave_their_places_to_others_once_the_store_answers(tmp_path: Path) -> None:
    """Only a part of it hangs: another server has the rest."""

    async def scenario(disk: Disk) -> None:
        hold = Pause()
        others = await crowd(disk, hold)
        assert await asyncio.gather(*others) == [None] * ABREAST
        await until(lambda: not disk.breaker.faulty)
        assert [await disk.breaker.use(lambda store: "fetched") for _ in range(20)] == ["fetched"] * 20
        assert disk.told == [CANNOT, BACK]
        hold.end()

    play(tmp_path, scenario, patience=1.0)


def test_a_use_that_hangs_beyond_the_end_of_an_outage_begins_another(tmp_path: Path) -> None:
    """Else its place would stay closed, with no probe to open it."""

    async def scenario(disk: Disk) -> None:
        hold = Pause()
        first = await crowd(disk, hold, 1)
        await asyncio.sleep(0.4)
        second = await crowd(disk, hold, 1)
        await asyncio.gather(*first)
        await until(lambda: not disk.breaker.faulty)
        await asyncio.gather(*second)
        await until(lambda: not disk.breaker.faulty)
        assert await disk.breaker.use(lambda store: "fetched") == "fetched"
        hold.end()

    play(tmp_path, scenario, patience=0.8)


def test_a_store_that_keeps_too_many_threads_is_left_alone_until_it_gives_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(disk: Disk) -> None:
        hold, looked, check = Pause(), 0, disk.store.check

        def look() -> None:
            nonlocal looked
            check()
            looked += 1

        monkeypatch.setattr(disk.store, "check", look)
        assert await disk.breaker.use(lambda store: hold.here()) is None
        await until(lambda: looked > 2)
        assert disk.breaker.faulty
        hold.end()
        await until(lambda: not disk.breaker.faulty)

    play(tmp_path, scenario, patience=0.1, most_stuck=1)


# Bounded uses.


def test_a_bounded_use_behind_a_crowd_is_waited_for_once_and_not_by_others(tmp_path: Path) -> None:
    """Ranks ask for the same choice one after the other: their waits would add up."""

    async def scenario(disk: Disk) -> None:
        hold = Pause()
        others = await crowd(disk, hold)
        assert await disk.breaker.use_within(lambda store: "found", 0.05) is None
        assert await disk.breaker.use_within(lambda store: "found", 1000.0) is None
        hold.end()
        await asyncio.gather(*others)
        await until(lambda: not disk.breaker._overdue)
        assert await disk.breaker.use_within(lambda store: "found", 20.0) == "found"

    play(tmp_path, scenario, probes=NEVER)


def test_a_bounded_use_that_is_overdue_does_not_close_the_store_for_others(tmp_path: Path) -> None:
    async def scenario(disk: Disk) -> None:
        hold = Pause()
        assert await disk.breaker.use_within(lambda store: hold.here(), 0.1) is None
        assert not disk.breaker.faulty
        assert await disk.publish()
        hold.end()

    assert play(tmp_path, scenario, probes=NEVER).told == []


def test_a_bounded_use_that_nobody_waits_for_any_more_still_begins_an_outage(tmp_path: Path) -> None:
    async def scenario(disk: Disk) -> None:
        hold = Pause()
        assert await disk.breaker.use_within(lambda store: hold.here(), 0.05) is None
        await until(lambda: disk.breaker.faulty)
        hold.end()
        await until(lambda: not disk.breaker.faulty)

    play(tmp_path, scenario, patience=0.3)


def test_of_those_who_ask_whether_a_store_that_hangs_takes_artifacts_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(disk: Disk) -> None:
        hold = Pause()
        monkeypatch.setattr(disk.store, "check", hold.here)
        assert await disk.breaker.takes_artifacts(), "the benefit of the doubt"
        began = time.monotonic()
        assert [await disk.breaker.takes_artifacts() for _ in range(5)] == [True] * 5
        assert time.monotonic() - began < 0.2
        hold.end()

    play(tmp_path, scenario, looks_within=0.2, probes=NEVER)
