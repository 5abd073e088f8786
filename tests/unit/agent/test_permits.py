"""Permits of a pool's workers: no more than cores that idle, and memory that is free, where they run."""

from __future__ import annotations

from kcoord.agent.pools import Permits
from kcoord.cgroups import NO_QUOTA

MUCH = 64 << 30  # bytes of memory


def test_permits_are_bounded_by_number_and_end_with_their_connection() -> None:
    permits = Permits()
    assert [permits.ask(owner, 2, MUCH, 8, NO_QUOTA) for owner in (1, 2, 3)] == [True, True, False]
    permits.gone(1)
    assert permits.ask(3, 2, MUCH, 8, NO_QUOTA)
    assert permits.ask(2, 2, MUCH, 8, NO_QUOTA), "for its next key"


def test_permits_are_bounded_by_the_cores_that_idle_and_taken_back_when_ranks_become_busy() -> None:
    permits = Permits()
    assert [permits.ask(owner, 100, MUCH, 2, NO_QUOTA) for owner in range(4)] == [True, True, False, False]
    assert permits.ask(0, 100, MUCH, 2, NO_QUOTA), "low-priority work keeps no core busy"
    assert not permits.ask(0, 100, MUCH, 0.2, NO_QUOTA)
    assert permits.ask(1, 100, MUCH, 1.2, NO_QUOTA), "one core is left, and one worker"


def test_a_quota_counts_what_the_workers_use_already() -> None:
    permits = Permits()
    assert [permits.ask(owner, 100, MUCH, 64, 2) for owner in range(2)] == [True, True]
    assert permits.ask(0, 100, MUCH, 64, 0.0), "the quota is used up by two workers, of which it is one"
    assert not permits.ask(2, 100, MUCH, 64, 0.0)


def test_short_memory_takes_a_permit_away() -> None:
    permits = Permits()
    assert permits.ask(1, 100, MUCH, 8, NO_QUOTA)
    assert not permits.ask(1, 100, 1 << 29, 8, NO_QUOTA)
    assert not permits.ask(2, 100, 1 << 29, 8, NO_QUOTA)


def test_memory_that_is_granted_and_not_taken_yet_is_not_granted_twice() -> None:
    permits = Permits()
    assert [permits.ask(owner, 100, 5 << 29, 8, NO_QUOTA) for owner in range(3)] == [True, True, False]
    permits.look()
    assert permits.ask(2, 100, 5 << 29, 8, NO_QUOTA), "what the others took is missing in what is free by now"
