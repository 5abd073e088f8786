"""The queue of a pool: each recipe once, in the order that ends a job's cold start soonest."""

from __future__ import annotations

import pytest

from benchmarks.cluster.play import bound
from benchmarks.cluster.table import recorded
from kcoord.agent.upcoming import Upcoming, dealt
from kcoord.packs.recipe import TRIED, Recipe


def recipe(name: str, seconds: float = 1.0, order: int = 0, target: str = "cuda:90") -> Recipe:
    return Recipe("triton", "kernels", name, {}, target, seconds, order)


def taken(queue: Upcoming) -> str:
    found = []
    while (each := queue.take()) is not None:
        found.append(each.qualname)
    return "".join(found)


def test_a_profile_is_taken_in_the_order_in_which_the_job_asked() -> None:
    queue = Upcoming()
    queue.later([recipe("c", 1.2, 2), recipe("a", 1.1, 0), recipe("b", 1.0, 1)], 0, 1, cores=1)
    assert taken(queue) == "abc"


def test_a_compile_that_is_longer_than_a_cores_share_comes_first() -> None:
    queue = Upcoming()
    short = [recipe(name, 1.0, order) for order, name in enumerate("abc")]
    queue.later([*short, recipe("z", 9.0, 99)], 0, 1, cores=4)
    assert taken(queue) == "zabc"


def test_each_node_begins_with_a_share_of_its_own_and_goes_on_with_the_others() -> None:
    recipes = [recipe(name, 1.0, order) for order, name in enumerate("abcdef")]
    orders = []
    for node in range(3):
        queue = Upcoming()
        queue.later(recipes, node, 3, cores=1)
        orders.append(taken(queue))
    assert sorted("".join(order[:2] for order in orders)) == sorted("abcdef")
    assert all(sorted(order) == sorted("abcdef") for order in orders)


def test_what_a_rank_is_about_to_use_comes_before_a_profile() -> None:
    queue = Upcoming()
    queue.later([recipe("a", order=0), recipe("b", order=1)], 0, 1, cores=1)
    queue.now([recipe("x"), recipe("b")])
    assert taken(queue) == "xba"


def test_what_was_only_tried_comes_after_all_shares_of_a_profile() -> None:
    queue = Upcoming()
    queue.later([recipe("c", 9.0, TRIED), recipe("a", 1.0, 5), recipe("b", 2.0, 6)], 0, 2, 1.0)
    assert taken(queue) == "bac"


def test_guesses_come_last_count_once_and_can_be_dropped() -> None:
    queue = Upcoming()
    assert queue.guess([recipe("a"), recipe("b"), recipe("c"), recipe("d")]) == 4
    queue.later([recipe("b")], 0, 1, cores=1)
    queue.now([recipe("c")])
    assert queue.guess([recipe("a"), recipe("b"), recipe("c")]) == 0
    queue.asked(recipe("d").digest)
    assert taken(queue) == "cba"
    queue.guess([recipe("e")])
    assert queue.new
    queue.drop_guesses()
    assert not queue


def test_a_profile_of_another_gpu_is_compiled_for_the_one_that_is_here() -> None:
    queue = Upcoming()
    queue.retarget("cuda:100")
    queue.later([recipe("a"), recipe("b", order=1), recipe("c", order=2, target="hip:gfx942")], 0, 1, cores=1)
    first = queue.take()
    for _ in range(2):
        queue.retarget("cuda:90")
        queue.retarget("cuda:100")
    found = [each for each in iter(queue.take, None) if each is not None]
    assert first == recipe("a")
    shown = [(each.qualname, each.target) for each in found]
    assert shown == [("a", "cuda:100"), ("b", "cuda:100"), ("b", "cuda:90"), ("c", "hip:gfx942")]


def test_each_recipe_is_taken_once_whoever_announces_it_again() -> None:
    queue = Upcoming()
    queue.now([recipe("a"), recipe("a")])
    assert taken(queue) == "a"
    queue.now([recipe("a")])
    queue.later([recipe("a")], 0, 1, cores=1)
    assert taken(queue) == ""


def test_a_rank_that_asks_takes_its_recipe_out() -> None:
    queue = Upcoming()
    queue.later([recipe("a"), recipe("b", order=1)], 0, 1, cores=1)
    queue.asked(recipe("a").digest)
    queue.asked("0" * 64)
    assert taken(queue) == "b"


def test_what_others_compile_is_looked_for_again_last_and_not_for_ever() -> None:
    queue = Upcoming()
    queue.now([recipe("a"), recipe("b")])
    first = queue.take()
    assert first is not None
    queue.busy(first)
    assert (taken(queue), queue.ready, queue.new, len(queue)) == ("b", False, False, 1)
    queue.again()
    queue.now([recipe("c")])
    assert taken(queue) == "ca"
    pauses, rounds = [], 0
    queue.busy(first)
    while queue:
        queue.again()
        rounds += 1
        if taken(queue):
            pauses.append(rounds)
            rounds = 0
            queue.busy(first)
    assert pauses == [2, 4, 8, 16, *[32] * 6], "seconds"


@pytest.mark.parametrize("world", [1, 2, 8, 32, 64, 128, 512, 2048])
def test_shares_of_real_kernels_take_equally_long(world: int) -> None:
    kernels = recorded()
    shares = dealt([recipe(f"k{n}", seconds, n) for n, (_, seconds) in enumerate(kernels)], world)
    assert sorted(each.order for share in shares for each in share) == list(range(len(kernels)))
    assert max(sum(each.seconds for each in share) for share in shares) <= 1.05 * bound(kernels, world)


def test_recipes_whose_seconds_nobody_knows_are_dealt_out_in_turn() -> None:
    shares = dealt([recipe(name, 0.0) for name in "abcdef"], 2)
    assert ["".join(each.qualname for each in share) for share in shares] == ["ace", "bdf"]
