"""Flights: which key is being compiled on this node, by whom, and who waits for it.

A pure state machine: no I/O, no clock, no randomness. Every method takes an event and returns the actions that follow, in
order; the server carries them out and reports back what came of them. A flight's life::

    claim ──▶ ASKING ──Won──▶ LOOKING ──no──▶ LEADING ──landing──▶ LANDING ──landed──▶ (gone; all waiters Ready)
                │ ▲             │ yes           │ failed / leader gone, stalled or over its limit
          Ready │ │ void        ▼               ▼
                ▼ │          (gone; Ready)   (gone; all Failed) / the hedge or the next waiter leads
              FETCHING ──ok──▶ (gone; Ready)

A claim that does not wait is Busy if its key has a flight, else it begins one; if another node then turns out to have the
lease it is Busy too, and its flight is gone unless somebody else waits. That the other node has it is remembered for a moment:
ranks of one node that walk the same list do not each ask the lease service about each key.

A compile that takes longer than its key's claimants expect is *hedged* (Dean and Barroso, The Tail at Scale, 2013): one waiter of
all nodes is let go ahead beside the leader, here or on another node; whose files land first are everybody's, and whoever
asks for them afterwards need not wait for the leader either.

Invariants, held after every event:

- a key has at most one flight, and a flight at most one leader and one hedge;
- every claimant is in exactly one place (waiting, leading, hedging) until it has been answered once;
- a flight that is not LANDING and has neither waiters nor leader nor hedge does not exist;
- nobody waits, and nobody hedges, for what has landed;
- a token that is not the leader's or the hedge's changes nothing;
- a claim that does not wait is the first of its flight, and is there while nobody compiles: it never inherits a lead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kcoord.agent.actions import (
    Action,
    Announce,
    AskHedge,
    AskLease,
    Claimant,
    EndHedge,
    EndLease,
    FailLease,
    Fetch,
    HasFailed,
    IsAlone,
    IsBusy,
    IsReady,
    Leads,
    Look,
    Tell,
    Told,
)
from kcoord.agent.flight import Flight, State
from kcoord.leases.base import Failed, Ready, Won


@dataclass(frozen=True)
class _Failure:
    log: str
    where: str
    until: float


class Flights:
    """All flights of a node. `limit`: seconds that a leader may take; `failure_ttl`: how long a failure is remembered."""

    def __init__(self, *, limit: float, failure_ttl: float) -> None:
        self._limit, self._failure_ttl = limit, failure_ttl
        self._flights: dict[str, Flight] = {}
        self._failures: dict[str, _Failure] = {}
        self._elsewhere: dict[str, float] = {}  # key → until when it is taken to be under way on another node
        self._serial = 0

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    def get(self, key: str) -> Flight | None:
        return self._flights.get(key)

    # Events from ranks.

    def claim(self, claimant: Claimant, now: float) -> list[Action]:
        """A rank asks for its key. It is told exactly once, now or later."""
        key = claimant.key
        failure = self._failures.get(key)
        if failure is not None:
            if now < failure.until:
                return [Tell(claimant, HasFailed(failure.log, failure.where))]
            del self._failures[key]
        flight = self._flights.get(key)
        if flight is not None:
            if flight.landed and not claimant.again:
                return [Tell(claimant, IsReady("wait", flight.landed))]
            if not claimant.waits:
                return [Tell(claimant, IsBusy())]
            flight.landed = ""  # it is gone
            flight.waiters[claimant.id] = claimant
            return []
        if not claimant.waits and now < self._elsewhere.get(key, now):
            return [Tell(claimant, IsBusy())]
        self._serial += 1
        flight = self._flights[key] = Flight(key, self._serial, now, claimant.hedge_after)
        flight.waiters[claimant.id] = claimant
        return [AskLease(key, flight.serial)]

    def landing(self, key: str, token: str) -> bool:
        """The leader, or the hedge, hands in its files: from now on its death changes nothing, and `landed` or `not_published`
        follows. False: the token is neither's; what is handed in with it may land all the same.
        """
        flight = self._flights.get(key)
        if flight is not None and flight.hedges(token) and not flight.hedge_lands:
            flight.hedge_lands = True
            return True
        if flight is None or flight.state is not State.LEADING or flight.token != token:
            return False
        flight.state = State.LANDING
        return True

    def landed(self, key: str, home: str) -> list[Action]:
        """The artifact is at `home`, whoever compiled it: everyone who waits may load it."""
        self._failures.pop(key, None)
        self._elsewhere.pop(key, None)
        flight = self._flights.get(key)
        if flight is None:
            self._serial += 1
            return [Announce(key, self._serial, home)]
        flight.waited = True
        actions = self._answer_all(flight, IsReady("wait", home))
        if flight.state is State.LEADING:  # somebody else's landed first; its own publish will be harmless
            flight.hedge_due, flight.landed = math.inf, home
            return [*actions, Announce(key, 0, home), *self._end_hedge(flight)]
        return [*actions, Announce(key, flight.serial, home), *self._remove(flight)]

    def failed(self, key: str, token: str, log: str, where: str, now: float) -> list[Action]:
        """The leader says that `key` does not compile: every waiter finds out for itself, at once and in parallel."""
        flight = self._flights.get(key)
        if flight is not None and flight.hedges(token):
            return self._hedge_ended(flight, now)  # the leader will say what there is to say
        if flight is None or not flight.leads(token):
            return []
        self._failures[key] = _Failure(log, where, now + self._failure_ttl)
        return [
            *self._answer_all(flight, HasFailed(log, where)),
            *self._remove(flight),
            FailLease(key, flight.serial, log, where),
        ]

    def not_published(self, key: str, token: str, why: str, now: float) -> list[Action]:
        """What the leader compiled stays with it. That says nothing about the kernel, so it is no failure: who waits here
        compiles for itself, at once, and on other nodes, whose disks may be better, the next one leads. What a hedge compiled
        stays with it too; it is waited for the leader as before."""
        flight = self._flights.get(key)
        if flight is not None and flight.hedges(token):
            return self._hedge_ended(flight, now)
        if flight is None or not flight.leads(token):
            return []
        answers = self._answer_all(flight, IsAlone(why))
        return [*answers, *self._remove(flight), EndLease(key, flight.serial)]

    def given_up(self, key: str, token: str, now: float) -> list[Action]:
        """The leader will not compile after all; the next waiter leads."""
        flight = self._flights.get(key)
        if flight is not None and flight.hedges(token):
            return self._hedge_ended(flight, now)
        if flight is None or not flight.leads(token):
            return []
        return self._next_leader(flight, now)

    def gone(self, owner: int, now: float) -> list[Action]:
        """A connection ended, or its process died: its claims are void, and what it led is led by the next waiter."""
        actions: list[Action] = []
        for flight in list(self._flights.values()):
            for claimant in [w for w in flight.waiters.values() if w.owner == owner]:
                del flight.waiters[claimant.id]
            if flight.hedge is not None and flight.hedge.owner == owner and not flight.hedge_lands:
                actions += self._hedge_ended(flight, now)
            if flight.leader is not None and flight.leader.owner == owner and flight.state is State.LEADING:
                actions += self._next_leader(flight, now)
            else:
                actions += self._end_if_deserted(flight)
        return actions

    def stalled(self, key: str, token: str, now: float) -> list[Action]:
        """Who compiles with this token gets nowhere: somebody else leads. What it publishes after all is as good as any."""
        flight = self._flights.get(key)
        if flight is not None and flight.hedges(token):
            return [] if flight.hedge_lands else self._hedge_ended(flight, now)
        if flight is None or flight.state is not State.LEADING or flight.token != token:
            return []
        return self._next_leader(flight, now)

    # Events from the lease service and the store. A `serial` that is not the flight's is yesterday's news.

    def must_wait(self, key: str, serial: int, holder: str, now: float, until: float = 0.0) -> list[Action]:
        """Another node is compiling. Until the moment `until`, claims that do not wait are Busy without asking it again."""
        flight = self._current(key, serial, State.ASKING)
        if flight is None:
            return []
        if not flight.remote and flight.hedge is None:
            flight.hedge_due = now + flight.hedge_after
        flight.remote, flight.waited = holder, True
        self._elsewhere[key] = until
        leaving = [w for w in flight.waiters.values() if not w.waits]
        for claimant in leaving:
            del flight.waiters[claimant.id]
        return [*(Tell(w, IsBusy()) for w in leaving), *self._end_if_deserted(flight)]

    def lease_answered(self, key: str, serial: int, answer: Won | Ready | Failed, now: float) -> list[Action]:
        flight = self._current(key, serial, State.ASKING)
        if flight is None:
            return [EndLease(key, serial)] if isinstance(answer, Won) else []
        flight.remote = ""
        self._elsewhere.pop(key, None)
        home = flight.some_home
        if isinstance(answer, Won):
            flight.state = State.LOOKING
            return [Look(key, serial, home)]
        if isinstance(answer, Ready):
            flight.state, flight.manifest = State.FETCHING, answer.manifest
            return [Fetch(key, serial, home, answer.manifest)]
        self._failures[key] = _Failure(answer.log, answer.where, now + self._failure_ttl)
        return [*self._answer_all(flight, HasFailed(answer.log, answer.where)), *self._remove(flight)]

    def looked(self, key: str, serial: int, found: str | None, now: float, manifest: str | None = None) -> list[Action]:
        """As the lease's holder: `found` is the home where the artifact is now, None if it is nowhere.

        `manifest` is its manifest's SHA-256 if it was in the store.
        """
        flight = self._current(key, serial, State.LOOKING)
        if flight is None:
            return []
        if found is None:
            return self._next_leader(flight, now)
        return [
            *self._answer_all(flight, flight.ready(found)),
            *self._remove(flight),
            Announce(key, serial, found, manifest),
        ]

    def fetched(self, key: str, serial: int, found: str | None) -> list[Action]:
        """None if what READY announced is not to be had: then that READY is void, and we ask again."""
        flight = self._current(key, serial, State.FETCHING)
        if flight is None:
            return []
        if found is not None or not (flight.waiters or flight.hedge):
            return [*self._answer_all(flight, flight.ready(found or "")), *self._remove(flight)]
        flight.state = State.ASKING
        return [AskLease(key, serial, void=flight.manifest)]

    def hedge_answered(self, key: str, serial: int, won: bool, now: float) -> list[Action]:
        """Whether the right to compile beside the leader is ours. If not, somebody has it, and it is asked for again later."""
        flight = self._flights.get(key)
        if flight is None or flight.serial != serial or not flight.hedge_asked:
            return [EndHedge(key, serial)] if won else []
        flight.hedge_asked = False
        if now < flight.hedge_due:  # another leads since we asked
            return [EndHedge(key, serial)] if won else []
        flight.hedge_due = now + flight.hedge_after if flight.is_led else math.inf
        hedge = flight.next_hedge()
        if not won:
            return []
        if hedge is None:
            return [EndHedge(key, serial)]
        del flight.waiters[hedge.id]
        flight.hedge, flight.hedge_token, flight.hedge_since = hedge, f"{serial}.{hedge.id}", now
        flight.waited = True
        return [Tell(hedge, Leads(flight.hedge_token, hedges=True))]

    def tick(self, now: float) -> list[Action]:
        """Call it at least once a second: waits are bounded, and so is the time of a leader and a hedge."""
        actions: list[Action] = []
        for flight in list(self._flights.values()):
            for claimant in [w for w in flight.waiters.values() if now >= w.deadline]:
                del flight.waiters[claimant.id]
                actions.append(Tell(claimant, IsAlone("waited as long as KCOORD_MAX_WAIT allows")))
            if flight.hedge is not None and not flight.hedge_lands and now - flight.hedge_since > self._limit:
                actions += self._hedge_ended(flight, now)
            if flight.state is State.LEADING and now - flight.led_since > self._limit:
                actions += self._next_leader(flight, now)
            else:
                actions += self._end_if_deserted(flight)
            if flight.needs_hedge(now):
                flight.hedge_asked = True
                actions.append(AskHedge(flight.key, flight.serial))
        for key in [k for k, f in self._failures.items() if now >= f.until]:
            del self._failures[key]
        for key in [k for k, until in self._elsewhere.items() if now >= until]:
            del self._elsewhere[key]
        return actions

    def derailed(self, serial: int) -> list[Action]:
        """An action of this flight failed in a way that nobody foresaw: let its waiters go."""
        for flight in self._flights.values():
            if flight.serial == serial and flight.state is not State.LEADING:
                answers = self._answer_all(flight, IsAlone("an error in the agent; its log has it"))
                return [*answers, *self._remove(flight), EndLease(flight.key, serial)]
        return []

    def _current(self, key: str, serial: int, state: State) -> Flight | None:
        flight = self._flights.get(key)
        return flight if flight is not None and flight.serial == serial and flight.state is state else None

    def _answer_all(self, flight: Flight, told: Told) -> list[Action]:
        answers: list[Action] = [Tell(w, told) for w in flight.waiters.values()]
        flight.waiters.clear()
        return answers

    def _next_leader(self, flight: Flight, now: float) -> list[Action]:
        """The hedge is at it already; else the first who waits."""
        if flight.leader is not None:
            flight.waited = True
        flight.hedge_due = now + flight.hedge_after
        if flight.hedge is not None:
            flight.leader, flight.token, flight.led_since = flight.hedge, flight.hedge_token, flight.hedge_since
            flight.state = State.LANDING if flight.hedge_lands else State.LEADING
            return self._end_hedge(flight)
        if not flight.waiters:
            return [*self._remove(flight), EndLease(flight.key, flight.serial)]
        flight.leader = flight.waiters.pop(next(iter(flight.waiters)))
        flight.token = f"{flight.serial}.{flight.leader.id}"
        flight.state, flight.led_since = State.LEADING, now
        return [Tell(flight.leader, Leads(flight.token))]

    def _hedge_ended(self, flight: Flight, now: float) -> list[Action]:
        """It did not get there: whoever waits goes on waiting, or is the next hedge after a while."""
        if flight.is_led:
            flight.hedge_due = now + flight.hedge_after
        return [*self._end_hedge(flight), *self._end_if_deserted(flight)]

    def _end_hedge(self, flight: Flight) -> list[Action]:
        if flight.hedge is None:
            return []
        flight.hedge, flight.hedge_token, flight.hedge_lands = None, "", False
        return [EndHedge(flight.key, flight.serial)]

    def _end_if_deserted(self, flight: Flight) -> list[Action]:
        """Nobody waits and nobody compiles. What is being looked up or fetched is let finish: it costs nothing more."""
        if flight.waiters or flight.leader or flight.hedge or flight.state is not State.ASKING:
            return []
        if self._flights.get(flight.key) is not flight:
            return []  # it has ended already
        return [*self._remove(flight), EndLease(flight.key, flight.serial)]

    def _remove(self, flight: Flight) -> list[Action]:
        del self._flights[flight.key]
        return self._end_hedge(flight)
