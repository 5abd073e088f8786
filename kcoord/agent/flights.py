"""Flights: the keys that are being compiled on this node, their leaders and their waiters.

A pure state machine: no I/O, no clock, no randomness. Every method takes an event and returns the actions that follow, in
order; the agent carries them out and reports their results as further events. A flight's life::

    claim ──▶ ASKING ──Won──▶ LOOKING ──no──▶ LEADING ──landing──▶ LANDING ──landed──▶ (gone; all waiters Ready)
                │ ▲             │ yes           │ failed / leader gone, stalled or over its limit
          Ready │ │ void        ▼               ▼
                ▼ │          (gone; Ready)   (gone; all Failed) / the hedge or the next waiter leads
              FETCHING ──ok──▶ (gone; Ready)

A claim begins no flight if the key's artifact has landed on this node: it is Ready at that home, until a rank that did not find
it there asks again. A rank has just looked at its own home, perhaps before the artifact landed, and may have a home of its own
(``TRITON_CACHE_DIR=…/rank3``).

A claim that does not wait is Busy if its key has a flight, else it begins one. If another node then turns out to have the
lease, the claim is Busy too, and the flight ends unless somebody else waits. That the other node has the lease is remembered for
a moment: ranks of one node that walk the same list do not each ask the lease service about each key.

A compile that takes longer than its key's claimants expect is *hedged* (Dean and Barroso, The Tail at Scale, 2013): one waiter of
all nodes is let go ahead beside the leader, here or on another node. The files that land first are everybody's, and later
claims need not wait for the leader either. If nothing is expected of a compile, its waiters are *overdue* after `max_wait`, or
four times that while a compile on this node is seen to work. Then one of them goes ahead in the same way, once for each flight:
the others wait for that one for as long again, and then all compile. If it was another node that they waited for, this node waits
for no other key of that lease's holder.

Invariants, held after every event:

- a key has at most one flight, and a flight at most one leader and one hedge;
- every claimant is in exactly one place (waiting, leading, hedging) until it has been answered once;
- a flight that is not LANDING and has neither waiters nor leader nor hedge does not exist;
- nobody waits, and nobody hedges, for a key that has landed;
- a token that is not the leader's or the hedge's changes nothing;
- a claim that does not wait is the first of its flight, and is there while nobody compiles: it never inherits a lead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
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
    Look,
    Reply,
)
from kcoord.agent.flight import Attempt, Flight, State
from kcoord.latest import Latest
from kcoord.leases import base as leases
from kcoord.protocol.messages import BUSY, Alone, ClaimAnswer, Failed, Lead, Ready

_MOST_HOLDERS = 1000
_MOST_HOMES = 20_000


@dataclass(frozen=True)
class _Failure:
    answer: Failed
    until: float


class Flights:
    """All flights of a node. `limit`: seconds that a leader may take; `failure_ttl`: seconds that a failure is remembered;
    `max_wait`: seconds from a claim to its deadline.
    """

    def __init__(self, *, limit: float, failure_ttl: float, max_wait: float) -> None:
        self._limit, self._failure_ttl, self._max_wait = limit, failure_ttl, max_wait
        self._flights: dict[str, Flight] = {}
        self._failures: dict[str, _Failure] = {}
        self._elsewhere: dict[str, float] = {}  # key → until when another node is taken to compile it
        self.overdue: Latest[str, None] = Latest(_MOST_HOLDERS)  # holders of leases that were waited for in vain
        self._landings = 0
        self._homes: Latest[str, tuple[str, int]] = Latest(_MOST_HOMES)  # key → home and number of its last landing
        self._serial = 0

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    def get(self, key: str) -> Flight | None:
        return self._flights.get(key)

    def landing_of(self, key: str) -> tuple[str, int]:
        """The home at which the key's artifact landed last, which may be gone, and the number of that landing; else "" and 0."""
        return self._homes.get(key, ("", 0))

    # Events from ranks.

    def claim(self, claimant: Claimant, now: float) -> list[Action]:
        """A rank asks for its key. It is answered exactly once, now or later."""
        key = claimant.key
        failure = self._failures.get(key)
        if failure is not None:
            if now < failure.until:
                return [Reply(claimant, failure.answer)]
            del self._failures[key]
        flight = self._flights.get(key)
        home, landing = self.landing_of(key)
        if landing and landing == claimant.missed:
            del self._homes[key]
        elif landing:
            return [Reply(claimant, Ready("store" if flight is None else "wait"), home)]
        if flight is not None:
            if not claimant.waits:
                return [Reply(claimant, BUSY)]
            flight.waiters[claimant.id] = claimant
            return []
        if not claimant.waits and now < self._elsewhere.get(key, now):
            return [Reply(claimant, BUSY)]
        self._serial += 1
        flight = self._flights[key] = Flight(key, self._serial, now, claimant.slow_after)
        flight.waiters[claimant.id] = claimant
        return [AskLease(key, flight.serial)]

    def landing(self, key: str, token: str) -> bool:
        """The leader, or the hedge, hands in its files: its death changes nothing from now on, and `landed` or `not_published`
        follows. False: the token is neither's, or was handed in before. The files may land all the same.
        """
        attempt = self._attempt(key, token)
        if attempt is None or attempt.lands:
            return False
        attempt.lands = True
        return True

    def landed(self, key: str, home: str) -> list[Action]:
        """The artifact is at `home`, whoever compiled it: everyone who waits may load it."""
        self._remember(key, home)
        self._failures.pop(key, None)
        self._elsewhere.pop(key, None)
        flight = self._flights.get(key)
        if flight is None:
            self._serial += 1
            return [Announce(key, self._serial, home)]
        actions = flight.answer_all(Ready("wait"), home)
        if flight.state is State.LEADING:  # somebody else's landed first; the leader's own publish will be harmless
            flight.hedge_from = math.inf
            return [*actions, Announce(key, 0, home), *self._end_hedge(flight)]
        return [*actions, Announce(key, flight.serial, home), *self._remove(flight)]

    def failed(self, key: str, token: str, log: str, where: str, now: float) -> list[Action]:
        """The leader reports that `key` does not compile: every waiter compiles it itself, at once and in parallel, to raise its
        own exception. A hedge's failure ends the hedge alone, for the leader will report its own, unless that one is overdue.
        """
        flight, others = self._led_by(key, token, now, or_succeeded=True)
        if flight is None:
            return others
        answer = Failed(log, where)
        self._failures[key] = _Failure(answer, now + self._failure_ttl)
        return self._end_awaited(flight, token, now, answer, FailLease(key, flight.serial, log, where))

    def not_published(self, key: str, token: str, why: str, now: float) -> list[Action]:
        """The leader compiled, and its files could not be published. That says nothing about the kernel, so it is no failure:
        who waits here compiles for itself, at once, and on other nodes, whose disks may be better, the next one leads. After a
        hedge's files the waiters go on waiting for the leader, unless that one is overdue.
        """
        flight, others = self._led_by(key, token, now, or_succeeded=True)
        if flight is None:
            return others
        return self._end_awaited(flight, token, now, Alone(why), EndLease(key, flight.serial))

    def given_up(self, key: str, token: str, now: float) -> list[Action]:
        """The leader will not compile after all; the next waiter leads."""
        flight, others = self._led_by(key, token, now)
        if flight is None:
            return others
        return self._next_leader(flight, now)

    def stalled(self, key: str, token: str, now: float) -> list[Action]:
        """The compile with this token makes no progress: somebody else leads. If it publishes after all, that is as good."""
        attempt = self._attempt(key, token)
        if attempt is None or attempt.lands:
            return []
        attempt.works = False
        return self.given_up(key, token, now)

    def works(self, key: str, token: str) -> None:
        """The compile with this token was seen to use the CPU: it is waited for longer, unless it stalls."""
        if (attempt := self._attempt(key, token)) is not None:
            attempt.works = True

    def gone(self, owner: int, now: float) -> list[Action]:
        """A connection ended, or its process died: its claims are void, and the next waiter leads in its place."""
        actions: list[Action] = []
        for flight in list(self._flights.values()):
            for claimant in [w for w in flight.waiters.values() if w.owner == owner]:
                del flight.waiters[claimant.id]
            actions += self._end_attempts(flight, now, lambda attempt: attempt.claimant.owner == owner)
        return actions

    # Events from the lease service and the store. Nothing follows from one of an earlier flight (`serial`).

    def must_wait(self, key: str, serial: int, holder: str, now: float, until: float = 0.0) -> list[Action]:
        """Another node is compiling. Until the moment `until`, claims that do not wait are Busy without asking it again. If that
        node is overdue with another key, the first who waits compiles instead.
        """
        flight = self._current(key, serial, State.ASKING)
        if flight is None:
            return []
        if not flight.remote and flight.hedge is None:
            flight.hedge_from = now
        flight.remote, flight.waited = holder, True
        actions: list[Action] = []
        if holder in self.overdue:
            actions += flight.succeed(now)
        else:
            self._elsewhere[key] = until
        leaving = [w for w in flight.waiters.values() if not w.waits]
        for claimant in leaving:
            del flight.waiters[claimant.id]
        return [*actions, *(Reply(w, BUSY) for w in leaving), *self._end_if_deserted(flight)]

    def lease_answered(
        self, key: str, serial: int, answer: leases.Won | leases.Ready | leases.Failed, now: float
    ) -> list[Action]:
        flight = self._current(key, serial, State.ASKING)
        if flight is None:
            return [EndLease(key, serial)] if isinstance(answer, leases.Won) else []
        flight.remote = ""
        self._elsewhere.pop(key, None)
        home = flight.some_home
        if isinstance(answer, leases.Won):
            flight.step = State.LOOKING
            return [Look(key, serial, home)]
        if isinstance(answer, leases.Ready):
            flight.step, flight.manifest = State.FETCHING, answer.manifest
            return [Fetch(key, serial, home, answer.manifest)]
        failure = Failed(answer.log, answer.where)
        self._failures[key] = _Failure(failure, now + self._failure_ttl)
        return [*flight.answer_all(failure), *self._remove(flight)]

    def looked(self, key: str, serial: int, home: str, manifest: str | None, now: float) -> list[Action]:
        """As the lease's holder: the artifact was in the store, and is at `home` now. `manifest`: its manifest's SHA-256, None if
        the store has none.
        """
        flight = self._current(key, serial, State.LOOKING)
        if flight is None:
            return []
        if manifest is None:
            return self._next_leader(flight, now)
        self._remember(key, home)
        answers = flight.answer_all(flight.ready, home)
        return [*answers, *self._remove(flight), Announce(key, serial, home, manifest)]

    def fetched(self, key: str, serial: int, found: str | None, *, packed: bool = False) -> list[Action]:
        """`found` is None if the artifact that READY announced cannot be had: then that READY is void, and we ask again.

        `packed`: it came from a pack.
        """
        flight = self._current(key, serial, State.FETCHING)
        if flight is None:
            return []
        flight.packed = packed
        if found is not None:
            self._remember(key, found)
        if found is not None or not (flight.waiters or flight.hedge):
            return [*flight.answer_all(flight.ready, found or ""), *self._remove(flight)]
        flight.step = State.ASKING
        return [AskLease(key, serial, void=flight.manifest)]

    def hedge_answered(self, key: str, serial: int, won: bool, now: float) -> list[Action]:
        """`won`: the right to compile beside the leader is ours. If not, somebody has it, and it is asked for again later."""
        refused: list[Action] = [EndHedge(key, serial)] if won else []
        flight = self._flights.get(key)
        if flight is None or flight.serial != serial or not flight.hedge_asked:
            return refused
        flight.hedge_asked = False
        if now < flight.hedge_due:  # another leads since we asked
            return refused
        flight.hedge_from = now if flight.is_led else math.inf
        claimant = flight.next_hedge() if flight.is_led and flight.hedge is None else None
        if not won or claimant is None:
            return refused
        return [flight.hedged_by(claimant, now)]

    def tick(self, now: float) -> list[Action]:
        """Call it at least once a second: waits are bounded, and so is the time of a leader and a hedge."""
        actions: list[Action] = []
        for flight in list(self._flights.values()):
            actions += self._end_attempts(flight, now, lambda attempt: now - attempt.since > self._limit)
            if flight.is_overdue(now, self._max_wait):
                if flight.overdue is None and flight.remote:
                    self.overdue[flight.remote] = None
                actions += [*flight.end_waits(now, self._max_wait), *self._end_if_deserted(flight)]
            if flight.needs_hedge(now):
                flight.hedge_asked = True
                actions.append(AskHedge(flight.key, flight.serial))
        for key in [k for k, f in self._failures.items() if now >= f.until]:
            del self._failures[key]
        for key in [k for k, until in self._elsewhere.items() if now >= until]:
            del self._elsewhere[key]
        return actions

    def derailed(self, serial: int) -> list[Action]:
        """A task of this flight ended in an unforeseen error: let the waiters go."""
        for flight in self._flights.values():
            if flight.serial == serial and flight.state is not State.LEADING:
                answers = flight.answer_all(Alone("an error in the agent; its log has it"))
                return [*answers, *self._remove(flight), EndLease(flight.key, serial)]
        return []

    # Shared by several events.

    def _remember(self, key: str, home: str) -> None:
        self._landings += 1
        self._homes[key] = home, self._landings

    def _current(self, key: str, serial: int, state: State) -> Flight | None:
        flight = self._flights.get(key)
        return flight if flight is not None and flight.serial == serial and flight.state is state else None

    def _attempt(self, key: str, token: str) -> Attempt | None:
        flight = self._flights.get(key)
        return None if flight is None else flight.attempt(token)

    def _end_awaited(self, flight: Flight, token: str, now: float, answer: ClaimAnswer, end: Action) -> list[Action]:
        """The compile with this token ended without an artifact. `end` is what becomes of the lease if it was the leader's."""
        answers = flight.answer_all(answer)
        if flight.leader is not None and flight.leader.token == token:
            return [*answers, *self._remove(flight), end]
        return [*answers, *self._hedge_ended(flight, now)]

    def _led_by(
        self, key: str, token: str, now: float, *, or_succeeded: bool = False
    ) -> tuple[Flight | None, list[Action]]:
        """The flight whose leader has `token`. Else None, and the actions that follow: a hedge with this token ends.

        `or_succeeded`: or whose hedge has it, while the leader is overdue. Then the others wait for the hedge.
        """
        flight = self._flights.get(key)
        attempt = self._attempt(key, token)
        if flight is None or attempt is None:
            return None, []
        if attempt is flight.leader or (or_succeeded and flight.overdue is not None):
            return flight, []
        return None, self._hedge_ended(flight, now)

    def _next_leader(self, flight: Flight, now: float) -> list[Action]:
        """The hedge, which compiles already; else the first who waits."""
        flight.hedge_from = now
        if flight.hedge is not None:
            flight.leader = flight.hedge
            return self._end_hedge(flight)
        if not flight.waiters:
            return [*self._remove(flight), EndLease(flight.key, flight.serial)]
        works = flight.leader is not None and flight.leader.works  # until it is seen what the next one does
        flight.leader = flight.attempt_of(next(iter(flight.waiters.values())), now, works)
        return [Reply(flight.leader.claimant, Lead(flight.leader.token))]

    def _end_attempts(self, flight: Flight, now: float, is_over: Callable[[Attempt], bool]) -> list[Action]:
        """End the attempts that are over, but not those whose files are being published; then the flight, if nobody is left."""
        actions: list[Action] = []
        if flight.hedge is not None and not flight.hedge.lands and is_over(flight.hedge):
            actions += self._hedge_ended(flight, now)
        if flight.leader is not None and not flight.leader.lands and is_over(flight.leader):
            return [*actions, *self._next_leader(flight, now)]
        return [*actions, *self._end_if_deserted(flight)]

    def _hedge_ended(self, flight: Flight, now: float) -> list[Action]:
        """The hedge did not get there: whoever waits goes on waiting, or is the next hedge after a while."""
        if flight.is_led:
            flight.hedge_from = now
        return [*self._end_hedge(flight), *self._end_if_deserted(flight)]

    def _end_hedge(self, flight: Flight) -> list[Action]:
        if flight.hedge is None:
            return []
        flight.hedge = None
        return [EndHedge(flight.key, flight.serial)]

    def _end_if_deserted(self, flight: Flight) -> list[Action]:
        """End a flight in which nobody waits and nobody compiles. A look or a fetch is let finish: it costs nothing more."""
        if flight.waiters or flight.leader or flight.hedge or flight.state is not State.ASKING:
            return []
        if self._flights.get(flight.key) is not flight:
            return []  # it has ended already
        return [*self._remove(flight), EndLease(flight.key, flight.serial)]

    def _remove(self, flight: Flight) -> list[Action]:
        del self._flights[flight.key]
        return self._end_hedge(flight)
