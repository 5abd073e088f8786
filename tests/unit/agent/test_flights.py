"""Transitions of the flights' state machine by their answers, which the model in `test_flights_model` does not know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kcoord.agent.flights import (
    Acquire,
    Action,
    Attempt,
    Claimant,
    EndLease,
    Flights,
    Reply,
    State,
    Upload,
)
from kcoord.protocol.messages import BUSY, Alone, Failed, Lead, Ready

KEY = "key"
LIMIT, FAILURE_TTL, MAX_WAIT = 100.0, 30.0, 50.0
A, B, C = (Claimant(n, 10 + n, KEY, f"/home/{n}", f"rank {n}", MAX_WAIT) for n in (1, 2, 3))

D = Claimant(5, 15, KEY, "/home/5", "rank 5", MAX_WAIT)
HURRIED = Claimant(4, 14, KEY, "/home/4", "rank 4", MAX_WAIT, waits=False)


def new_flights(limit: float = LIMIT) -> Flights:
    return Flights(limit=limit, failure_ttl=FAILURE_TTL, max_wait=MAX_WAIT)


def led_by_a(*waiters: Claimant, limit: float = LIMIT) -> tuple[Flights, str]:
    flights = new_flights(limit)
    for claimant in (A, *waiters):
        flights.claim(claimant, 0.0)
    (reply,) = flights.may_compile(KEY, 1, 0.0)
    assert isinstance(reply, Reply)
    assert isinstance(reply.answer, Lead)
    assert reply.claimant is A
    return flights, reply.answer.token


def answered(actions: list[Action]) -> dict[int, object]:
    """Claim → its answer; of a `Ready` one, with its home."""
    replies = [a for a in actions if isinstance(a, Reply)]
    assert len({r.claimant.id for r in replies}) == len(replies)
    return {r.claimant.id: (r.answer, r.home) if isinstance(r.answer, Ready) else r.answer for r in replies}


# Claims.


def test_a_claim_soon_after_a_failure_is_answered_with_it_at_once() -> None:
    flights, token = led_by_a()
    flights.failed(KEY, token, "no registers", "rank 1", 10.0)
    assert flights.claim(B, 10.0 + FAILURE_TTL - 0.1) == [Reply(B, Failed("no registers", "rank 1"))]
    assert list(flights) == []


def test_a_failure_is_forgotten_after_its_time() -> None:
    flights, token = led_by_a()
    flights.failed(KEY, token, "no registers", "rank 1", 10.0)
    assert flights.claim(B, 10.0 + FAILURE_TTL) == [Acquire(KEY, 2, B.home)]


# What comes of acquiring.


def test_an_artifact_that_another_node_announced_answers_all_who_wait() -> None:
    flights = new_flights()
    assert flights.claim(A, 0.0) == [Acquire(KEY, 1, A.home)]
    flights.claim(B, 0.0)
    assert flights.found(KEY, 1, A.home) == [Reply(A, Ready("store"), A.home), Reply(B, Ready("store"), A.home)]
    assert list(flights) == []


def test_an_artifact_from_a_pack_is_answered_as_such_unless_it_was_waited_for() -> None:
    for waited, source in ((False, "pack"), (True, "wait")):
        flights = new_flights()
        flights.claim(A, 0.0)
        if waited:
            flights.must_wait(KEY, 1, "node 2", 0.0)
        assert flights.found(KEY, 1, A.home, packed=True) == [Reply(A, Ready(source), A.home)]


def test_an_artifact_that_the_lease_s_holder_found_is_announced_with_its_manifest() -> None:
    flights = new_flights()
    flights.claim(A, 0.0)
    assert flights.found(KEY, 1, A.home, "abc") == [Reply(A, Ready("store"), A.home), Upload(KEY, 1, A.home, "abc")]
    assert list(flights) == []


def test_a_failure_on_another_node_is_every_waiter_s_answer_and_remembered() -> None:
    flights = new_flights()
    flights.claim(A, 0.0)
    flights.claim(B, 0.0)
    failure = Failed("no registers", "node 2")
    assert flights.failed_elsewhere(KEY, 1, "no registers", "node 2", 0.0) == [Reply(A, failure), Reply(B, failure)]
    assert flights.claim(C, 1.0) == [Reply(C, failure)]


def test_yesterday_s_news_of_a_lease_does_not_touch_today_s_flight() -> None:
    flights = new_flights()
    flights.claim(A, 0.0)
    flights.gone(A.owner, 0.0)
    flights.claim(B, 0.0)
    assert flights.may_compile(KEY, 1, 0.0) == [EndLease(KEY, 1)]
    assert flights.found(KEY, 1, A.home, "abc") == []
    assert flights.failed_elsewhere(KEY, 1, "log", "", 0.0) == []
    assert flights.must_wait(KEY, 1, "node 2", 0.0) == []
    (flight,) = flights
    assert (flight.serial, flight.state, flight.remote) == (2, State.ACQUIRING, "")


# Artifacts that have landed on this node.


def test_a_rank_that_looked_a_moment_too_early_is_sent_to_what_has_landed() -> None:
    flights, token = led_by_a()
    flights.landing(KEY, token)
    flights.landed(KEY, "/there")
    for claimant in (B, HURRIED):
        assert flights.claim(claimant, 0.0) == [Reply(claimant, Ready("store"), "/there", remembered=True)]
    flights = new_flights()
    flights.claim(A, 0.0)
    flights.found(KEY, 1, A.home)
    assert flights.claim(B, 0.0) == [Reply(B, Ready("store"), A.home, remembered=True)]


# Claims that do not wait.


def test_claims_that_do_not_wait_have_an_artifact_that_is_being_fetched_from_the_store() -> None:
    flights, other = new_flights(), replace(HURRIED, id=5, owner=15)
    flights.claim(HURRIED, 0.0)
    assert flights.claim(other, 0.0) == []
    assert answered(flights.found(KEY, 1, A.home, "abc")) == dict.fromkeys((4, 5), (Ready("store"), A.home))


@pytest.mark.parametrize("first", [A, HURRIED])
def test_once_the_store_has_nothing_the_first_claim_leads_and_only_those_that_wait_stay(first: Claimant) -> None:
    flights, other = new_flights(), replace(HURRIED, id=5, owner=15)
    for claimant in (first, B, other):
        flights.claim(claimant, 0.0)
    lead, busy = flights.may_compile(KEY, 1, 0.0)
    assert isinstance(lead, Reply)
    assert (lead.claimant, type(lead.answer), busy) == (first, Lead, Reply(other, BUSY))
    (flight,) = flights
    assert list(flight.waiters.values()) == [B]
    assert flights.claim(other, 0.0) == [Reply(other, BUSY)]


def test_a_claim_that_does_not_wait_is_busy_if_another_node_compiles_and_its_flight_is_gone() -> None:
    flights = new_flights()
    flights.claim(HURRIED, 0.0)
    assert flights.must_wait(KEY, 1, "node 2", 0.0) == [Reply(HURRIED, BUSY), EndLease(KEY, 1)]
    assert list(flights) == []
    assert flights.must_wait(KEY, 1, "node 2", 0.0) == []
    assert flights.may_compile(KEY, 1, 0.0) == [EndLease(KEY, 1)]


def test_a_claim_that_does_not_wait_is_busy_at_once_while_another_node_is_known_to_compile() -> None:
    flights = new_flights()
    flights.claim(HURRIED, 0.0)
    flights.must_wait(KEY, 1, "node 2", 0.0, until=2.0)
    other = replace(HURRIED, id=5, owner=15)
    assert flights.claim(other, 1.9) == [Reply(other, BUSY)]
    assert list(flights) == []
    assert flights.claim(other, 2.0) == [Acquire(KEY, 2, other.home)]


def test_a_claim_that_waits_asks_although_another_node_is_known_to_compile() -> None:
    flights = new_flights()
    flights.claim(HURRIED, 0.0)
    flights.must_wait(KEY, 1, "node 2", 0.0, until=2.0)
    assert flights.claim(A, 1.0) == [Acquire(KEY, 2, A.home)]


@pytest.mark.parametrize("news", ["may compile", "found", "failed", "landed"])
def test_a_key_that_another_node_was_at_is_asked_after_again_once_there_is_news(news: str) -> None:
    flights = new_flights()
    flights.claim(A, 0.0)
    flights.must_wait(KEY, 1, "node 2", 0.0, until=1000.0)
    if news == "may compile":
        flights.may_compile(KEY, 1, 0.5)
    elif news == "found":
        flights.found(KEY, 1, A.home)
    elif news == "failed":
        flights.failed_elsewhere(KEY, 1, "log", "node 2", 0.5)
    else:
        flights.landed(KEY, A.home)
    flights.gone(A.owner, 0.5)
    flights.tick(FAILURE_TTL + 1)
    (action,) = flights.claim(replace(HURRIED, again=True), FAILURE_TTL + 1)
    assert isinstance(action, Acquire)


# Leading and landing.


def test_somebody_else_s_artifact_is_ready_for_all_and_the_leader_leads_on() -> None:
    flights, token = led_by_a(B)
    actions = flights.landed(KEY, "/elsewhere")
    assert actions == [Reply(B, Ready("wait"), "/elsewhere"), Upload(KEY, 0, "/elsewhere")]
    assert flights.landing(KEY, token)
    assert flights.landed(KEY, A.home) == [Upload(KEY, 1, A.home)]


def test_an_artifact_that_lands_while_we_ask_ends_the_asking() -> None:
    flights = new_flights()
    flights.claim(A, 0.0)
    assert flights.landed(KEY, "/elsewhere") == [
        Reply(A, Ready("wait"), "/elsewhere"),
        Upload(KEY, 1, "/elsewhere"),
    ]
    assert flights.may_compile(KEY, 1, 0.0) == [EndLease(KEY, 1)]


def test_an_artifact_that_nobody_asked_for_is_announced() -> None:
    flights = new_flights()
    assert flights.landed(KEY, "/elsewhere") == [Upload(KEY, 1, "/elsewhere")]


def test_an_artifact_ends_the_memory_of_a_failure() -> None:
    flights, token = led_by_a()
    flights.failed(KEY, token, "no registers", "rank 1", 0.0)
    flights.landed(KEY, "/elsewhere")
    assert flights.claim(B, 1.0) == [Reply(B, Ready("store"), "/elsewhere", remembered=True)]


def test_a_publish_that_fails_is_no_failure_of_the_kernel_and_holds_up_nobody() -> None:
    flights, token = led_by_a(B, C)
    flights.landing(KEY, token)
    alone = Alone("disk full")
    assert flights.not_published(KEY, token, "disk full", 0.0) == [Reply(B, alone), Reply(C, alone), EndLease(KEY, 1)]
    assert flights.claim(B, 0.0) == [Acquire(KEY, 2, B.home)], "nothing is remembered"


# Waits that last for too long. `B`, `C` and `D` wait for `A`, and are overdue at `MAX_WAIT`.


def alone(actions: list[Action]) -> set[int]:
    """The claims that are answered `Alone`; nobody else is answered."""
    assert all(isinstance(answer, Alone) for answer in answered(actions).values())
    return set(answered(actions))


def overdue_flight() -> tuple[Flights, str]:
    """A leads, B has gone ahead at `MAX_WAIT`, and C and D wait for B; B's token."""
    flights, _ = led_by_a(B, C, D)
    assert flights.tick(MAX_WAIT - 0.1) == []
    assert flights.tick(MAX_WAIT) == [Reply(B, Lead("1.2", hedges=True), late="rank 1")]
    return flights, "1.2"


def waiting_for(holder: str, *claimants: Claimant) -> Flights:
    flights = new_flights()
    for claimant in claimants:
        flights.claim(claimant, 0.0)
    flights.must_wait(KEY, 1, holder, 0.0)
    return flights


@pytest.mark.parametrize("token", ["1.1", "1.2"])
def test_the_files_that_land_first_end_the_second_wait(token: str) -> None:
    flights, _ = overdue_flight()
    assert flights.landing(KEY, token)
    ready = (Ready("wait"), "/there")
    assert answered(flights.landed(KEY, "/there")) == {C.id: ready, D.id: ready}


def test_a_compile_that_works_is_waited_for_four_times_as_long_and_so_is_the_one_that_follows() -> None:
    flights, token = led_by_a(B, C, limit=1e9)
    flights.works(KEY, token)
    flights.works(KEY, "1.999")
    assert flights.tick(4 * MAX_WAIT - 0.1) == []
    assert flights.tick(4 * MAX_WAIT) == [Reply(B, Lead("1.2", hedges=True), late="rank 1")]
    assert flights.tick(8 * MAX_WAIT - 0.1) == []
    assert alone(flights.tick(8 * MAX_WAIT)) == {C.id}


def test_who_takes_over_from_a_dead_leader_that_worked_is_waited_for_as_long() -> None:
    """Else its waiters, who have waited since the first one began, would not give it the time to show that it works."""
    flights, token = led_by_a(B, C, limit=1e9)
    flights.works(KEY, token)
    assert flights.gone(A.owner, 2 * MAX_WAIT) == [Reply(B, Lead("1.2"))]
    assert flights.tick(2 * MAX_WAIT) == []


def test_who_takes_over_from_a_leader_that_stalls_is_not_taken_to_work() -> None:
    flights, token = led_by_a(B, C)
    flights.works(KEY, token)
    flights.stalled(KEY, token, 10.0)
    assert flights.tick(MAX_WAIT) == [Reply(C, Lead("1.3", hedges=True), late="rank 2")]


def test_who_comes_late_waits_as_long_as_the_others_did() -> None:
    flights, _ = overdue_flight()
    late = replace(D, id=9, deadline=2 * MAX_WAIT + 5)
    flights.claim(late, MAX_WAIT + 5)
    assert alone(flights.tick(2 * MAX_WAIT)) == {C.id, D.id}
    assert alone(flights.tick(2 * MAX_WAIT + 5)) == {late.id}


def test_a_slow_compile_s_hedge_is_the_one_that_the_others_wait_for_once_more() -> None:
    flights, _, _ = hedged_flight()
    assert flights.tick(MAX_WAIT) == []
    assert flights.tick(MAX_WAIT + SLOW - 0.1) == []
    assert alone(flights.tick(MAX_WAIT + SLOW)) == {C.id}


def test_if_the_one_that_went_ahead_dies_the_next_one_does_and_the_bound_stays() -> None:
    flights, _ = overdue_flight()
    flights.gone(B.owner, MAX_WAIT + 10)
    assert flights.tick(MAX_WAIT + 10) == [Reply(C, Lead("1.3", hedges=True), late="rank 1")]
    assert alone(flights.tick(2 * MAX_WAIT)) == {D.id}


def test_one_that_went_ahead_and_leads_since_is_not_followed_by_another() -> None:
    flights, token = overdue_flight()
    assert flights.gone(A.owner, MAX_WAIT + 1) == []
    assert flights.tick(MAX_WAIT + 2) == []
    assert flights.landing(KEY, token)


def test_if_the_one_that_went_ahead_fails_all_who_wait_compile_at_once() -> None:
    """A leader that is overdue may never report: else one bad kernel would fail in one rank after the other."""
    flights, token = overdue_flight()
    failure = Failed("no registers", "rank 2")
    actions = flights.failed(KEY, token, "no registers", "rank 2", MAX_WAIT + 1)
    assert answered(actions) == {C.id: failure, D.id: failure}
    assert flights.claim(replace(D, id=9), MAX_WAIT + 2) == [Reply(replace(D, id=9), failure)]
    assert flights.landing(KEY, "1.1"), "the leader leads on"


def test_threads_of_the_leader_s_own_process_compile_when_they_have_waited_for_long_enough() -> None:
    flights, _ = led_by_a(replace(B, who=A.who))
    assert alone(flights.tick(MAX_WAIT)) == {B.id}


def test_after_a_long_wait_for_another_node_one_waiter_compiles_and_goes_on_listening() -> None:
    flights = waiting_for("node 2", A, B)
    assert flights.tick(MAX_WAIT) == [Reply(A, Lead("1.1", hedges=True), late="node 2")]
    assert answered(flights.found(KEY, 1, A.home)) == {B.id: (Ready("wait"), A.home)}


@pytest.mark.parametrize("hurried", [False, True])
def test_no_other_key_of_a_holder_is_waited_for_that_was_waited_for_in_vain(hurried: bool) -> None:
    flights = waiting_for("node 2", A)
    flights.tick(MAX_WAIT)
    first, second = replace(HURRIED if hurried else C, key="other"), replace(D, key="other")
    for claimant in (first, second):
        flights.claim(claimant, MAX_WAIT)
    assert flights.must_wait("other", 2, "node 2", MAX_WAIT) == [
        Reply(first, Lead(f"2.{first.id}", hedges=True), late="node 2")
    ]
    assert flights.must_wait("other", 2, "node 2", MAX_WAIT) == [], "the second waits for the first"
    flights.landing("other", f"2.{first.id}")
    assert set(answered(flights.landed("other", "/there"))) == {second.id}


def test_another_holder_s_keys_are_waited_for_and_so_are_those_of_a_slow_one() -> None:
    flights = waiting_for("node 2", SLOW_A)
    flights.tick(SLOW)
    flights.claim(replace(B, key="other"), SLOW)
    assert flights.must_wait("other", 2, "node 2", SLOW) == []
    flights.tick(MAX_WAIT)
    flights.claim(replace(C, key="third"), MAX_WAIT)
    assert flights.must_wait("third", 3, "node 3", MAX_WAIT) == []


def test_a_store_that_takes_too_long_lets_one_rank_compile_and_the_look_goes_on() -> None:
    flights = new_flights()
    flights.claim(A, 0.0)
    assert answered(flights.tick(MAX_WAIT)) == {A.id: Lead("1.1", hedges=True)}
    assert flights.may_compile(KEY, 1, MAX_WAIT) == []
    assert flights.landing(KEY, "1.1")


SLOW = 8.0
SLOW_A, SLOW_B, SLOW_C = (replace(c, slow_after=lambda: SLOW) for c in (A, B, C))


def slow_flight() -> Flights:
    """A leads, B and C wait, and the moment has come to hedge."""
    flights = new_flights()
    for claimant in (SLOW_A, SLOW_B, SLOW_C):
        flights.claim(claimant, 0.0)
    flights.may_compile(KEY, 1, 0.0)
    assert flights.tick(SLOW - 0.1) == []
    return flights


def hedged_flight() -> tuple[Flights, str, str]:
    """A leads, B hedges, C waits; the leader's token and the hedge's."""
    flights = slow_flight()
    (reply,) = flights.tick(SLOW)
    assert isinstance(reply, Reply)
    assert isinstance(reply.answer, Lead)
    assert reply.claimant is SLOW_B
    assert reply.answer.hedges
    flight = flights.get(KEY)
    assert flight is not None
    assert flight.leader is not None
    return flights, flight.leader.token, reply.answer.token


def test_a_thread_of_the_leader_s_own_process_is_no_hedge() -> None:
    flights = new_flights()
    for claimant in (SLOW_A, replace(SLOW_B, who=SLOW_A.who)):
        flights.claim(claimant, 0.0)
    flights.may_compile(KEY, 1, 0.0)
    assert flights.tick(SLOW) == []


def test_a_hedge_is_due_however_often_it_is_heard_that_the_other_node_still_compiles() -> None:
    flights = new_flights()
    flights.claim(SLOW_A, 0.0)
    for heard in (0.0, SLOW / 2, SLOW - 0.1):
        flights.must_wait(KEY, 1, "node 2", heard)
    assert answered(flights.tick(SLOW)) == {A.id: Lead("1.1", hedges=True)}


def test_what_a_hedge_has_landed_is_ready_for_whoever_asks_while_the_leader_is_still_at_it() -> None:
    flights, token, hedge_token = hedged_flight()
    flights.landing(KEY, hedge_token)
    flights.landed(KEY, "/there")
    for claimant in (D, HURRIED):
        assert flights.claim(claimant, SLOW) == [Reply(claimant, Ready("wait"), "/there", remembered=True)]
    assert flights.claim(replace(D, again=True), SLOW) == [], "it was there, and is gone"
    assert flights.landing(KEY, token)
    assert set(answered(flights.landed(KEY, A.home))) == {D.id}


@pytest.mark.parametrize("how", ["failed", "given up", "gone", "stalled", "not published", "too long"])
def test_a_hedge_that_does_not_get_there_is_followed_by_another_later(how: str) -> None:
    flights, _, hedge_token = hedged_flight()
    now = SLOW + 1
    if how == "failed":
        actions = flights.failed(KEY, hedge_token, "log", "rank 2", now)
    elif how == "given up":
        actions = flights.given_up(KEY, hedge_token, now)
    elif how == "gone":
        actions = flights.gone(B.owner, now)
    elif how == "stalled":
        actions = flights.stalled(KEY, hedge_token, now)
    elif how == "not published":
        assert flights.landing(KEY, hedge_token)
        actions = flights.not_published(KEY, hedge_token, "disk full", now)
    else:
        flights, now = hedged_and_patient(), SLOW + LIMIT + 1
        actions = flights.tick(now)
    assert actions == []
    assert flights.tick(now + SLOW - 0.1) == []
    assert answered(flights.tick(now + SLOW)) == {C.id: Lead("1.3", hedges=True)}


def hedged_and_patient() -> Flights:
    """A node that waits for another one, with a hedge here and a waiter that waits for ever."""
    flights = new_flights()
    for claimant in (SLOW_A, replace(SLOW_C, deadline=1e9)):
        flights.claim(claimant, 0.0)
    flights.must_wait(KEY, 1, "node 2", 0.0)
    flights.tick(SLOW)
    return flights


@pytest.mark.parametrize("how", ["gone", "given up", "stalled"])
def test_the_hedge_leads_when_the_leader_does_not_get_there(how: str) -> None:
    flights, token, hedge_token = hedged_flight()
    actions = {
        "gone": lambda: flights.gone(A.owner, SLOW + 1),
        "given up": lambda: flights.given_up(KEY, token, SLOW + 1),
        "stalled": lambda: flights.stalled(KEY, token, SLOW + 1),
    }[how]()
    assert actions == []
    flight = flights.get(KEY)
    assert flight is not None
    assert (flight.leader, flight.hedge) == (Attempt(SLOW_B, hedge_token, SLOW), None)
    assert flights.landing(KEY, hedge_token)


def test_what_is_published_is_nobody_s_stall() -> None:
    flights, token = led_by_a(B)
    flights.landing(KEY, token)
    assert flights.stalled(KEY, token, 5.0) == []


def test_a_new_leader_is_not_hedged_for_the_slowness_of_the_one_before() -> None:
    flights = slow_flight()
    flight = flights.get(KEY)
    assert flight is not None
    assert flight.leader is not None
    flights.stalled(KEY, flight.leader.token, SLOW - 1)
    assert flights.tick(2 * SLOW - 1.1) == []
    assert answered(flights.tick(2 * SLOW - 1)) == {C.id: Lead("1.3", hedges=True)}
