"""The flights under every order of events: a server that is played by hypothesis, and one that tries all orders.

`Server` carries actions out in a model, holds the invariants after every event, and can say which events are possible.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kcoord.agent import flights as act
from kcoord.agent.flights import Claimant, Flight, Flights, State
from kcoord.latest import Latest
from kcoord.protocol import messages
from kcoord.settings import PATIENCE
from tests.support.fuzzing import fuzz_machine, is_long

LIMIT, FAILURE_TTL, MAX_WAIT, BUSY_FOR, SLOW = 40.0, 15.0, 25.0, 2.0, 10.0


@dataclass
class Server:
    """What the agent and the world around the flights would be doing now."""

    flights: Flights = field(default_factory=lambda: Flights(limit=LIMIT, failure_ttl=FAILURE_TTL, max_wait=MAX_WAIT))
    now: float = 0.0
    claimed: dict[int, Claimant] = field(default_factory=dict)  # every claim that was ever made
    unanswered: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    acquiring: dict[int, str] = field(default_factory=dict)
    cancelled: dict[int, str] = field(default_factory=dict)  # was acquiring; the answer may be under way all the same
    held: dict[int, str] = field(default_factory=dict)  # rights to compile that were given and not ended
    tokens: dict[str, tuple[str, int]] = field(default_factory=dict)  # every token → its key and claim
    leads: dict[str, str] = field(default_factory=dict)  # key → the token that leads now
    hedges: dict[str, str] = field(default_factory=dict)  # key → the token that hedges now
    publishing: list[tuple[str, str]] = field(default_factory=list)  # keys and tokens; "" hands in without leading

    # Events.

    def claim(self, owner: int, key: str, home: str, waits: bool = True, again: bool = False) -> None:
        number, deadline = len(self.claimed) + 1, self.now + MAX_WAIT
        claimant = Claimant(number, owner, key, home, f"rank {owner}", deadline, waits, lambda: SLOW, again)
        self.claimed[claimant.id] = claimant
        self.unanswered.add(claimant.id)
        flight, before = self.flights.get(key), self.picture()
        is_compiled = flight is not None and bool(flight.remote or flight.attempts())
        self.do(self.flights.claim(claimant, self.now))
        if is_compiled and not waits:
            assert claimant.id not in self.unanswered, "a claim that does not wait joined a compile"
            assert self.picture() == before

    def owner_gone(self, owner: int) -> None:
        self.gone.add(owner)
        mine = {i for i in self.unanswered if self.claimed[i].owner == owner}
        self.unanswered -= mine
        landing = self.landing_tokens()
        self.do(self.flights.gone(owner, self.now))
        assert landing == self.landing_tokens(), "a death stopped a publish"

    def landing_tokens(self) -> set[str]:
        """The tokens whose files are being published."""
        return {attempt.token for flight in self.flights for attempt in flight.attempts() if attempt.lands}

    def acquired(self, serial: int, answer: str) -> None:
        key = self.acquiring.pop(serial, "") or self.cancelled.pop(serial)
        if answer == "may compile":
            self.held[serial] = key
            self.do(self.flights.may_compile(key, serial, self.now))
        elif answer == "failed":
            self.do(self.flights.failed_elsewhere(key, serial, "log", "node 2", self.now))
        else:
            manifest = "manifest" if answer == "found" else None
            self.do(self.flights.found(key, serial, "/found", manifest))

    def wait(self, serial: int) -> None:
        key = self.acquiring.get(serial) or self.cancelled[serial]
        before, unanswered = self.picture(), set(self.unanswered)
        flight = self.flights.get(key)
        in_vain = "node 2" in self.flights.overdue and flight is not None and flight.serial == serial
        self.do(self.flights.must_wait(key, serial, "node 2", self.now, self.now + BUSY_FOR))
        assert not in_vain or flight.state is not State.ACQUIRING or flight.hedge, "it is waited for again"
        if self.unanswered == unanswered:
            assert self.picture() == before

    def works(self, key: str, token: str) -> None:
        self.flights.works(key, token)
        self.check()

    def stall(self, key: str, token: str) -> None:
        self.by_token(token, key, lambda: self.flights.stalled(key, token, self.now))

    def landing(self, key: str, token: str) -> None:
        compiling = token in (self.leads.get(key), self.hedges.get(key)) and token not in self.landing_tokens()
        before = self.picture()
        landing = self.flights.landing(key, token)
        assert landing == compiling, "a token lands that neither leads nor hedges, or lands twice"
        if not compiling:
            assert self.picture() == before
        self.publishing.append((key, token if landing else ""))

    def published(self, index: int, well: bool) -> None:
        key, token = self.publishing.pop(index)
        if well:
            flight = self.flights.get(key)
            leads = flight is not None and flight.state is State.LEADING
            leader = flight.leader.token if leads else None
            self.do(self.flights.landed(key, "/published"))
            assert key not in self.leads or self.leads[key] == leader, "somebody else's artifact made a leader"
            assert leader is None or key in self.leads, "somebody else's artifact ended a leader's lead"
            assert not any(self.claimed[i].key == key for i in self.unanswered), "somebody waits for what is there"
        elif token:
            self.do(self.flights.not_published(key, token, "disk full", self.now))
            assert token not in (self.leads.get(key), self.hedges.get(key)), "it is waited for what will not come"

    def fail(self, key: str, token: str) -> None:
        self.by_token(token, key, lambda: self.flights.failed(key, token, "log", "rank", self.now))

    def give_up(self, key: str, token: str) -> None:
        self.by_token(token, key, lambda: self.flights.given_up(key, token, self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        actions = self.flights.tick(self.now)
        ends = [a.claimant for a in actions if isinstance(a, act.Reply) and isinstance(a.answer, messages.Alone)]
        assert all(claimant.deadline <= self.now for claimant in ends), "a wait ended before its time"
        self.do(actions)
        for flight in self.flights:
            works = any(attempt.works for attempt in flight.attempts())
            for waiter in flight.waiters.values():
                deadline = waiter.deadline + (PATIENCE - 1) * MAX_WAIT * works
                assert self.now < deadline or flight.has_successor, "nobody goes ahead of a leader that is overdue"
                if flight.overdue is not None:
                    deadline = max(deadline, flight.overdue + (PATIENCE if works else 1) * MAX_WAIT)
                assert self.now < deadline, "a wait is longer than its bound"

    def derail(self, serial: int) -> None:
        """This flight's task ended in an unforeseen error, and reports nothing."""
        self.do(self.flights.derailed(self.acquiring.pop(serial), serial))

    # What follows from them.

    def by_token(self, token: str, key: str, event: Callable[[], list[act.Action]]) -> None:
        before, compiling = self.picture(), token in (self.leads.get(key), self.hedges.get(key))
        actions = event()
        if compiling:
            self.do(actions)
        else:
            assert not actions, "a late token did something"
            assert self.picture() == before

    def do(self, actions: list[act.Action]) -> None:
        for action in actions:
            if isinstance(action, act.Reply):
                self.answered(action)
            elif isinstance(action, act.Acquire):
                assert action.serial not in self.acquiring, "the lease is asked for twice"
                assert action.serial not in self.held, "a lease that is held is asked for"
                self.acquiring[action.serial] = action.key
            else:  # the end of a lease
                self.held.pop(action.serial, None)
                if action.serial in self.acquiring:
                    self.cancelled[action.serial] = self.acquiring.pop(action.serial)
        self.check()

    def answered(self, reply: act.Reply) -> None:
        claimant, answer = reply.claimant, reply.answer
        assert claimant.owner not in self.gone, "a process that has ended is answered"
        assert claimant.id in self.unanswered, "a claim is answered twice"
        self.unanswered.remove(claimant.id)
        assert not (claimant.waits and answer is messages.BUSY), "a claim that waits is sent away"
        assert bool(reply.home) == isinstance(answer, messages.Ready)
        if isinstance(answer, messages.Lead):
            assert answer.token not in self.tokens, "a token is given twice"
            flight = self.flights.get(claimant.key)
            compiling = flight.attempts() if answer.hedges else [flight.leader]  # a hedge may lead by now
            assert any(attempt.claimant is claimant for attempt in compiling)
            self.tokens[answer.token] = (claimant.key, claimant.id)

    def check(self) -> None:
        """The invariants."""
        flights = list(self.flights)
        assert len({f.key for f in flights}) == len(flights)
        self.leads, self.hedges = {}, {}
        waiting = list[int]()
        for flight in flights:
            for number, waiter in flight.waiters.items():
                assert number == waiter.id
                assert waiter.key == flight.key
                waiting.append(number)
            if flight.leader is not None:
                self.leads[flight.key] = flight.leader.token
            if flight.hedge is not None:
                self.hedges[flight.key] = flight.hedge.token
        assert sorted(waiting) == sorted(self.unanswered), "a claim is lost, or in two places"
        for flight in flights:
            self.check_flight(flight)
        alive = {f.serial for f in flights}
        assert self.held.keys() <= alive, "a lease that was won is held by no flight"

    def check_flight(self, flight: Flight) -> None:
        assert self.flights.get(flight.key) is flight
        attempts = flight.attempts()
        for attempt in attempts:
            assert self.tokens[attempt.token] == (flight.key, attempt.claimant.id)
            if attempt.lands:
                assert (flight.key, attempt.token) in self.publishing, "nobody will report that its files landed"
            else:
                assert attempt.claimant.owner not in self.gone, "who compiles is dead"
                assert self.now - attempt.since <= LIMIT
        assert len({attempt.token for attempt in attempts}) == len(attempts)
        if flight.leader is None:
            assert flight.serial in self.acquiring, "a flight waits for a task that nobody runs"
        if flight.state is not State.LANDING:
            assert flight.waiters or flight.leader or flight.hedge
        for waiter in flight.waiters.values():
            if not waiter.waits:
                assert not flight.attempts(), "a claim that does not wait waits for a compile on this node"
                assert not flight.remote, "a claim that does not wait waits for a compile on another node"
        if flight.leader is not None:
            assert flight.serial in self.held, "a flight leads without its lease"

    def picture(self) -> object:
        """Everything that an event which changes nothing must leave as it is."""
        flights = [
            (f.key, f.serial, f.state, tuple(f.waiters), f.overdue, copy.copy(f.leader), copy.copy(f.hedge))
            for f in self.flights
        ]
        return flights, copy.copy(self.flights._failures)

    def finish(self) -> Iterator[None]:
        """Every task ends in the worst way, and time passes: then every claim was answered, and nothing is left.

        Yields after each event.
        """
        ticks = len(self.claimed) + 2
        while ticks >= 0:
            if self.acquiring or self.cancelled:
                self.acquired(next(iter(self.acquiring or self.cancelled)), "may compile")
            elif self.publishing:
                self.published(0, well=False)
            elif self.unanswered or self.held or list(self.flights):
                self.tick(max(LIMIT, 2 * PATIENCE * MAX_WAIT) + 1)
                ticks -= 1
            else:
                return
            yield
        assert not self.unanswered, "a claim is never answered"
        assert not self.held, "a lease is held for ever"
        raise AssertionError("a flight never ends")


OWNERS = range(5)
KEYS = ("a", "b")
ANSWERS = ("may compile", "found", "announced", "failed")


class RandomServer(RuleBasedStateMachine):
    server: Server

    @initialize()
    def start(self) -> None:
        self.server = Server()

    @rule(
        owner=st.sampled_from(OWNERS),
        key=st.sampled_from(KEYS),
        home=st.sampled_from(["/one", "/two"]),
        waits=st.booleans(),
        again=st.booleans(),
    )
    def claim(self, owner: int, key: str, home: str, waits: bool, again: bool) -> None:
        self.server.claim(owner, key, home, waits, again)

    @rule(owner=st.sampled_from(OWNERS))
    def owner_gone(self, owner: int) -> None:
        self.server.owner_gone(owner)
        self.server.gone.discard(owner)  # its number is used again, by a process that has claimed nothing yet

    @rule(data=st.data(), answer=st.sampled_from(ANSWERS))
    def acquired(self, data: st.DataObject, answer: str) -> None:
        outstanding = [*self.server.acquiring, *self.server.cancelled]
        if outstanding:
            self.server.acquired(data.draw(st.sampled_from(outstanding)), answer)

    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        outstanding = [*self.server.acquiring, *self.server.cancelled]
        if outstanding:
            self.server.wait(data.draw(st.sampled_from(outstanding)))

    @rule(key=st.sampled_from(KEYS), owners=st.permutations(OWNERS))
    def take_off(self, key: str, owners: list[int]) -> None:
        """The usual way: three ranks ask, nobody has it, the first one leads."""
        for owner in owners[:3]:
            self.server.claim(owner, key, f"/home/{owner}")
        for serial in [s for s, k in self.server.acquiring.items() if k == key]:
            self.server.acquired(serial, "may compile")

    @rule(key=st.sampled_from(KEYS), owners=st.permutations(OWNERS))
    def slow(self, key: str, owners: list[int]) -> None:
        """A leader, here or on another node, who takes long, and a waiter who goes ahead."""
        self.take_off(key, owners)
        self.server.tick(SLOW + 1)

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def works(self, data: st.DataObject, key: str) -> None:
        self.server.works(key, self.token(data))

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def stall(self, data: st.DataObject, key: str) -> None:
        self.server.stall(key, self.token(data))

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def landing(self, data: st.DataObject, key: str) -> None:
        self.server.landing(key, self.token(data))

    @rule(data=st.data(), well=st.booleans())
    def published(self, data: st.DataObject, well: bool) -> None:
        if self.server.publishing:
            self.server.published(data.draw(st.integers(0, len(self.server.publishing) - 1)), well)

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def fail(self, data: st.DataObject, key: str) -> None:
        self.server.fail(key, self.token(data))

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def give_up(self, data: st.DataObject, key: str) -> None:
        self.server.give_up(key, self.token(data))

    @rule(seconds=st.sampled_from([0.5, 5.0, 14.0, 30.0]))
    def tick(self, seconds: float) -> None:
        self.server.tick(seconds)

    @rule(data=st.data())
    def derail(self, data: st.DataObject) -> None:
        if self.server.acquiring:
            self.server.derail(data.draw(st.sampled_from(list(self.server.acquiring))))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "server"):
            self.server.check()

    def teardown(self) -> None:
        if hasattr(self, "server"):
            for _ in self.server.finish():
                pass

    def token(self, data: st.DataObject) -> str:
        """One that leads now, one that is late, or one that nobody ever had."""
        live, late = [*self.server.leads.values(), *self.server.hedges.values()], list(self.server.tokens)
        return data.draw(st.sampled_from([*live, *live, *late[-3:], "", "9.9"]))


@pytest.mark.fuzz
def test_random_orders_of_events_for_two_keys() -> None:
    fuzz_machine(RandomServer, 150, steps=40)


# All orders: one key, three claimants, each of which waits or does not.


def possible(server: Server) -> list[tuple[str, tuple[Any, ...]]]:
    """Every event that can come next."""
    events: list[tuple[str, tuple[Any, ...]]] = []
    made = len(server.claimed)
    if made < 3:
        events += [("claim", (made, "a", f"/home/{made}", waits)) for waits in (True, False)]
    events += [("owner_gone", (o,)) for o in range(made) if o not in server.gone]
    for serial in [*server.acquiring, *server.cancelled]:
        events += [("acquired", (serial, answer)) for answer in ANSWERS]
        events.append(("wait", (serial,)))
    for token in server.tokens:
        events += [("fail", ("a", token)), ("give_up", ("a", token)), ("stall", ("a", token))]
        if any(token == a.token and not a.works for f in server.flights for a in f.attempts()):
            events.append(("works", ("a", token)))
        if len(server.publishing) < 2:
            events.append(("landing", ("a", token)))
    if not server.publishing:
        events.append(("landing", ("a", "foreign")))
    for index in range(len(server.publishing)):
        events += [("published", (index, True)), ("published", (index, False))]
    events += [("derail", (s,)) for s in server.acquiring]
    if server.now < 80:
        events += [("tick", (20.0,))]
    return events


def fingerprint(server: Server) -> int:
    """Equal for two orders of events after which everything that can happen is the same: a hash of 64 bits."""
    failure = server.flights._failures.get("a")
    landed = server.flights._landed.get("a")
    elsewhere = server.flights._elsewhere.get("a", 0.0)
    flight = server.flights.get("a")
    state = (
        flight and (
            flight.serial,
            *[(w.id, w.waits) for w in flight.waiters.values()],
            *[a and (a.claimant.id, a.token, a.since, a.lands, a.works) for a in (flight.leader, flight.hedge)],
            flight.waited,
            flight.remote,
            flight.hedge_from,
            flight.overdue,
        ),
        failure and failure.until,
        landed,
        elsewhere if elsewhere > server.now else None,
        tuple(server.flights.overdue),
        server.flights._serial,
        server.now,
        tuple([c.deadline for c in server.claimed.values()]),
        frozenset(server.gone),
        tuple(server.acquiring),
        tuple(server.cancelled),
        tuple(server.tokens),
        tuple(server.publishing),
    )  # fmt: skip
    return hash(state)


_containers: dict[type, list[str]] = {}  # of a class, the attributes that are containers


def copied(container: Any) -> Any:
    """As `copy.copy`, which takes three times as long for a `Latest`."""
    kind = type(container)
    if kind is not Latest:
        return container.copy()
    twin = kind.__new__(kind)
    dict.update(twin, container)
    vars(twin).update(vars(container))
    return twin


def twin_of(thing: Any) -> Any:
    """As `copy.copy`, with its containers copied, too."""
    kind, values = type(thing), vars(thing).copy()
    if kind not in _containers:
        _containers[kind] = [name for name, value in values.items() if isinstance(value, (dict, list, set))]
    for name in _containers[kind]:
        values[name] = copied(values[name])
    twin = object.__new__(kind)
    twin.__dict__ = values
    return twin


def copy_of(server: Server) -> Server:
    """As `copy.deepcopy`, a good deal faster."""
    twin: Server = twin_of(server)
    twin.flights = twin_of(server.flights)
    twin.flights._flights = {key: twin_of(flight) for key, flight in twin.flights._flights.items()}
    for flight in twin.flights:
        flight.leader, flight.hedge = (attempt and twin_of(attempt) for attempt in (flight.leader, flight.hedge))
    return twin


def finish(server: Server, finished: set[int]) -> None:
    """As `Server.finish`, up to one of the states that were `finished` before, by their fingerprints."""
    passed, events = [fingerprint(server)], server.finish()
    while passed[-1] not in finished and next(events, events) is None:
        passed.append(fingerprint(server))
    finished.update(passed)


DEPTH = 8 if is_long() else 7


@pytest.mark.fuzz
def test_every_order_of_events_for_three_claims_of_one_key() -> None:
    level = [(Server(), ())]  # type: list[tuple[Server, tuple[Any, ...]]]
    seen, finished = {fingerprint(level[0][0])}, set[int]()
    outcomes: set[str] = set()
    hedged: set[str] = set()
    overdue: set[str] = set()
    waited_in_vain = False
    for depth in range(DEPTH):
        following = []
        for server, story in level:
            for event in possible(server):
                twin, (name, arguments) = copy_of(server), event
                try:
                    getattr(twin, name)(*arguments)
                    mark = fingerprint(twin)
                    if mark in seen:
                        continue
                    seen.add(mark)
                    outcomes |= {f.state.value for f in twin.flights}
                    hedged |= {f.state.value for f in twin.flights if f.hedge is not None}
                    overdue |= {f.state.value for f in twin.flights if f.overdue is not None}
                    waited_in_vain |= bool(twin.flights.overdue)
                    if depth < DEPTH - 1:
                        following.append((copy_of(twin), (*story, event)))
                    finish(twin, finished)
                except AssertionError as error:
                    raise AssertionError(f"{error}, after {(*story, event)}") from error
        level = following
    assert outcomes == {s.value for s in State}
    assert hedged == outcomes, "a state in which nobody was ever hedged"
    assert overdue == outcomes, "a state in which no wait was ever too long"
    assert waited_in_vain, "no node was ever waited for in vain"
    assert len(seen) > 20_000, "the exploration has become shallow"
