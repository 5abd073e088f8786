"""Facts: when one answers a claim, and when the service must be asked all the same."""

from __future__ import annotations

import asyncio

import pytest

from kcoord.leases.base import RECHECK, Failed, Ready, Wait, Won
from kcoord.leases.facts import Facts

_TTL = 15.0


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def facts(now: list[float]) -> Facts:
    facts = Facts(_TTL, clock=lambda: now[0])
    facts.begin()
    return facts


def test_a_ready_answers_until_it_is_void(facts: Facts, now: list[float]) -> None:
    facts.hear("k", Ready("m"))
    now[0] += 1e6
    assert facts.known("k") == Ready("m")
    assert facts.known("k", void="another") == Ready("m")
    assert facts.known("k", void="m") is None
    assert facts.known("l") is None


def test_a_leader_is_asked_for_again_before_a_waiter_looks_again(facts: Facts, now: list[float]) -> None:
    facts.hear("k", Wait("host", _TTL))
    now[0] += 0.8 * RECHECK
    assert facts.known("k") == Wait("host", pytest.approx(_TTL - 0.8 * RECHECK))  # type: ignore[arg-type]
    now[0] += 0.1 * RECHECK
    assert facts.known("k") is None


@pytest.mark.parametrize(("followers", "patience"), [(8, 0.85 * RECHECK), (400, 5.0), (10**6, _TTL)])
def test_the_more_agents_there_are_the_more_seldom_each_asks(
    facts: Facts, now: list[float], followers: int, patience: float
) -> None:
    facts.followers = followers
    facts.hear("k", Wait("host", 3 * _TTL))
    now[0] += patience - 0.01
    assert facts.known("k") is not None
    now[0] += 0.02
    assert facts.known("k") is None


def test_a_lease_that_has_ended_is_no_fact(facts: Facts, now: list[float]) -> None:
    facts.followers = 10**6
    facts.hear("k", Wait("host", 1.0))
    now[0] += 1.01
    assert facts.known("k") is None


@pytest.mark.parametrize("answer", [Won(1), Failed("log", "where")])
def test_what_changes_soon_is_asked_each_time(facts: Facts, answer: Won | Failed) -> None:
    facts.hear("k", Ready("m"))
    facts.learn("k", answer, facts.number)
    assert facts.known("k") is None


def test_an_answer_is_older_than_the_news_that_came_while_it_was_on_its_way(facts: Facts) -> None:
    """The answer and the news come over two connections. Else whoever waits for the key would wait in vain."""
    asked = facts.number
    facts.hear("k", Ready("m"))
    facts.learn("k", Wait("host", _TTL), asked)
    assert facts.known("k") == Ready("m")
    facts.hear("k", None)
    facts.learn("k", Wait("host", _TTL), asked)
    assert facts.known("k") is None
    facts.learn("k", Wait("host", _TTL), facts.number)
    assert facts.known("k") == Wait("host", _TTL)


def test_nothing_is_known_of_a_time_in_which_changes_may_be_missed(facts: Facts) -> None:
    facts.hear("k", Ready("m"))
    asked = facts.number
    facts.forget()
    facts.hear("l", Ready("m"))
    facts.learn("l", Ready("m"), facts.number)
    assert facts.known("k") is facts.known("l") is None
    facts.begin()
    facts.learn("l", Wait("host", _TTL), asked)
    assert facts.known("l") is None, "it was asked before"
    facts.learn("l", Wait("host", _TTL), facts.number)
    assert facts.known("l") is not None


def test_who_watches_a_key_is_woken_by_what_it_waits_for_and_when_news_may_be_missed(facts: Facts) -> None:
    event = asyncio.Event()
    facts.watch("k", event)
    facts.hear("l", Ready("m"))
    facts.hear("k", Wait("host", _TTL))
    assert not event.is_set()
    for wake in (lambda: facts.hear("k", Ready("m")), lambda: facts.hear("k", None), facts.forget):
        wake()
        assert event.is_set()
        event.clear()
    facts.unwatch("k", event)
    assert not facts.watched


def test_old_news_does_not_replace_newer(facts: Facts) -> None:
    facts.hear("k", None)
    facts.hear_old("k", Ready("old"))
    facts.hear_old("l", Ready("m"))
    assert facts.known("k") is None
    assert facts.known("l") == Ready("m")


def test_the_oldest_facts_are_forgotten_first(facts: Facts) -> None:
    for n in range(20_010):
        facts.hear(f"{n}", Ready("m"))
    assert facts.known("9") is None
    assert facts.known("10") == facts.known("20009") == Ready("m")
