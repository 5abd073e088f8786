"""Each rank's way through the list that all ranks have."""

from __future__ import annotations

import heapq

import pytest

from benchmarks.cluster.play import bound
from benchmarks.cluster.table import recorded
from kcoord.packs.order import order
from kcoord.warmup.tasks import Task


def tasks_of(*seconds: float) -> list[Task]:
    return [Task(f"{n}", lambda waits: "loaded", s) for n, s in enumerate(seconds)]


def names(tasks: list[Task]) -> list[str]:
    return [task.name for task in tasks]


@pytest.mark.parametrize("world", [1, 2, 3, 7, 64, 5000])
@pytest.mark.parametrize("count", [0, 1, 2, 10, 301])
def test_every_rank_tries_every_task_once(world: int, count: int) -> None:
    tasks = tasks_of(*(1 / (n + 1) for n in range(count)))
    for rank in {0, 1 % world, world // 2, world - 1}:
        assert sorted(names(order(tasks, rank, world))) == sorted(names(tasks))


def test_the_longest_are_begun_first_by_one_rank_each() -> None:
    tasks = tasks_of(9, 8, 7, 6, 5, 4, 3, 2)
    assert [order(tasks, rank, 4)[0].name for rank in range(4)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize("world", [2, 8, 32, 64, 128, 512, 2048])
def test_shares_of_real_kernels_take_equally_long(world: int) -> None:
    """Each rank compiles what it is the first to come to, if nobody is ever late: no rank is at it much longer than it must."""
    kernels = recorded()
    tasks = [Task(name, lambda waits: "loaded", seconds) for name, seconds in kernels]
    ways = [order(tasks, rank, world) for rank in range(world)]
    assert simulated(ways) <= 1.05 * bound(kernels, world)


def test_tasks_whose_seconds_nobody_knows_are_dealt_out_in_turn() -> None:
    tasks = tasks_of(0, 0, 0, 0, 0, 0)
    assert names(order(tasks, 0, 2)[:3]) == ["0", "2", "4"]
    assert names(order(tasks, 1, 2)[:3]) == ["1", "3", "5"]


def test_what_others_should_have_done_is_asked_for_between_ones_own() -> None:
    tasks = tasks_of(*[1.0] * 10)
    assert names(order(tasks, 0, 2)) == ["0", "2", "4", "1", "6", "3", "8", "5", "7", "9"]


def test_ranks_of_one_node_ask_for_others_tasks_from_different_places() -> None:
    tasks = tasks_of(*[1.0] * 64)
    begins = [next(int(t.name) for t in order(tasks, rank, 64) if t.name != str(rank)) for rank in range(8)]
    gaps = [abs(a - b) for n, a in enumerate(begins) for b in begins[:n]]
    assert min(gaps) >= 3, begins


def simulated(ways: list[list[Task]]) -> float:
    """When the last compile ends, in seconds, if asking costs nothing and what is begun or done is passed over."""
    begun: set[str] = set()
    places = [0] * len(ways)
    free = [(0.0, rank) for rank in range(len(ways))]
    end = 0.0
    while free:
        now, rank = heapq.heappop(free)
        end = max(end, now)
        while places[rank] < len(ways[rank]):
            task = ways[rank][places[rank]]
            places[rank] += 1
            if task.name not in begun:
                begun.add(task.name)
                heapq.heappush(free, (now + task.seconds, rank))
                break
    return end
