"""A job's counters: kept on the node whatever its disk does, shared over nodes, and added up whatever the others say."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from kcoord.agent.chores.chore import Chores
from kcoord.agent.chores.statistics import Statistics
from kcoord.errors import LeaseUnavailable
from kcoord.protocol.identity import UNNAMED
from kcoord.telemetry.events import Notices
from kcoord.telemetry.ledger import Ledger


@pytest.mark.parametrize("job", ["..", ".hidden", "a/../../b", "x" * 300, "\udcff"], ids=repr)
def test_a_jobs_counters_are_kept_below_their_directory_whatever_it_is_called(job: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "local", "agent")
    ledger.add(job, {"compiles": 2})
    ledger.add("other", {"compiles": 1})
    assert sorted(ledger.save()) == sorted([job, "other"])
    (one, two) = (p.parent for p in (tmp_path / "local" / "stats").glob("*/agent.json"))
    assert one.parent == two.parent == tmp_path / "local" / "stats"
    assert Ledger(tmp_path / "local", "").total(job)["counters"]["compiles"] == 2


def test_counters_that_a_disk_refused_are_written_later(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "local", "agent")
    ledger.add("one", {"compiles": 2})
    ledger.add("two", {"compiles": 3})
    (tmp_path / "local").write_text("in the way")
    with pytest.raises(OSError, match="Not a directory"):
        ledger.save()
    (tmp_path / "local").unlink()
    assert ledger.save() == ["one", "two"]
    assert Ledger(tmp_path / "local", "").total(None)["counters"]["compiles"] == 5


@pytest.mark.parametrize(
    "content",
    ['{"compiles": NaN}', '{"compiles": 1e999}', '{"compiles": -3}', '{"compiles": true}', "[" * 60_000, "7", "\x00"],
    ids=lambda content: content[:20],
)  # fmt: skip
def test_a_broken_file_of_counters_spoils_no_sum(content: str, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "agent")
    ledger.add("job", {"compiles": 2})
    ledger.save()
    (tmp_path / "stats/job/broken.json").write_text(content)
    os.mkfifo(tmp_path / "stats/job/pipe.json")
    assert Ledger(tmp_path, "").total(None)["counters"]["compiles"] == 2


def test_a_job_of_a_long_name_is_counted_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "agent")
    for job in ("é" * 300, "\udcff", "x" * 300):
        ledger.add(job, {"compiles": 1})
    ledger.save()
    assert ledger.total(None)["counters"]["compiles"] == 3
    assert len(ledger.jobs()) == 3


def test_jobs_of_last_month_are_forgotten_with_their_directories(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "agent")
    for job in ("old", "new"):
        ledger.add(job, {"compiles": 1})
    ledger.save()
    (tmp_path / "stats/old/.killed").write_text("an agent that was killed while it wrote")
    os.utime(tmp_path / "stats/old", (1e9, 1e9))
    Ledger(tmp_path, "").forget_old()
    assert Ledger(tmp_path, "").jobs() == ["new"]


def test_a_disk_that_hangs_holds_up_neither_statistics_nor_the_end(tmp_path: Path) -> None:
    hangs = threading.Event()

    class Hung(Ledger):
        def by_agent(self, job: str) -> dict[str, dict[str, float]]:
            hangs.wait(60)
            return {}

    async def scenario() -> None:
        statistics = Statistics(Hung(tmp_path, "agent"), "agent", Notices(), None)
        statistics.add("job", {"compiles": 2})
        answer = await asyncio.wait_for(statistics.answer("job"), 20)
        assert answer["counters"]["compiles"] == 2, "its own"
        await asyncio.wait_for(Chores(statistics.chores).drain(0.2), 20)

    try:
        asyncio.run(scenario())
    finally:
        hangs.set()


def test_what_other_nodes_say_they_counted_spoils_no_sum_and_is_asked_for_once_if_nobody_answers(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        asked: list[str] = []

        async def share(job: str, agent: str, counters: dict[str, float], read: bool) -> dict[str, dict[str, float]]:
            asked.append(job)
            if "dead" in down:
                raise LeaseUnavailable("dead")
            return {"other": {"compiles": 5, "waits": float("nan"), "requests": float("inf")}}

        down: set[str] = set()
        statistics = Statistics(Ledger(tmp_path, "agent"), "agent", Notices(), share)
        for n in range(20):
            statistics.add(f"job {n}\udcff", {"compiles": 1})
        Chores(statistics.chores).pulse()
        found = await statistics.answer("job 0\udcff")
        assert (found["counters"]["compiles"], found["counters"]["waits"]) == (6, 0)
        asked[-1].encode()
        await Chores(statistics.chores).drain(20)
        down.add("dead")
        asked.clear()
        statistics = Statistics(Ledger(tmp_path, "agent"), "agent", Notices(), share)
        assert (await statistics.answer(None))["counters"]["compiles"] == 20
        assert len(asked) == 1
        statistics.add("late", {"compiles": 1})
        Chores(statistics.chores).pulse()
        while len(asked) < 2:
            await asyncio.sleep(0.01)
        down.clear()
        await Chores(statistics.chores).drain(20)
        assert asked[-1] == "late", "it is shared when somebody answers again"

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_sums_that_are_shared_last_are_the_latest(tmp_path: Path) -> None:
    """What is shared replaces what was: a question and a save, at the same moment, may go by two connections."""

    async def scenario() -> None:
        begun, slow = asyncio.Event(), asyncio.Event()
        shared: dict[str, float] = {}

        async def share(job: str, agent: str, counters: dict[str, float], read: bool) -> dict[str, dict[str, float]]:
            if not begun.is_set():
                begun.set()
                await slow.wait()
            shared.update(counters)
            return {}

        statistics = Statistics(Ledger(tmp_path, "agent"), "agent", Notices(), share)
        statistics.add("job", {"compiles": 1})
        asked = asyncio.create_task(statistics.answer("job"))
        await begun.wait()
        statistics.add("job", {"compiles": 1})
        Chores(statistics.chores).pulse()
        await asyncio.sleep(0.2)
        slow.set()
        await asked
        await Chores(statistics.chores).drain(20)
        assert shared == {"compiles": 2}

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_each_launch_of_an_unnamed_job_is_counted_apart(tmp_path: Path) -> None:
    """One name for all of them gathered the agents of every job of every user in one hash."""
    by_name: dict[str, dict[str, dict[str, float]]] = {}

    async def share(job: str, agent: str, counters: dict[str, float], read: bool) -> dict[str, dict[str, float]]:
        by_name.setdefault(job, {})[agent] = counters
        return by_name[job] if read else {}

    async def scenario() -> None:
        torchrun = {"MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}
        for agent, environ in [("a", {}), ("b", {}), ("c", torchrun), ("d", torchrun | {"MASTER_PORT": "29501"})]:
            statistics = Statistics(Ledger(tmp_path / agent, agent), agent, Notices(), share, environ)
            statistics.add(UNNAMED, {"compiles": 1})
            assert (await statistics.answer(UNNAMED))["agents"] == 1
            await Chores(statistics.chores).drain(20)
        other_node = Statistics(Ledger(tmp_path / "e", "e"), "e", Notices(), share, torchrun)
        other_node.add(UNNAMED, {"compiles": 1})
        found = await other_node.answer(UNNAMED)
        assert (found["jobs"], found["agents"], found["counters"]["compiles"]) == ([UNNAMED], 2, 2), "one launch"
        other_node.add("named", {"compiles": 1})
        await Chores(other_node.chores).drain(20)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert "named" in by_name
    assert UNNAMED not in by_name
    assert len(by_name) == 5
