"""Flights: the keys that are being compiled on this node, their leaders and their waiters.

A pure state machine: no I/O, no clock, no randomness. Every method takes an event and returns the actions that follow, in
order; the agent carries them out and reports their results as further events. A flight's life::

    claim ──▶ ACQUIRING ──may compile──▶ LEADING ──landing──▶ LANDING ──landed──▶ (gone; all waiters Ready)
                  │ found                   │ failed / leader gone, stalled or over its limit
                  ▼                         ▼
             (gone; Ready)             (gone; all Failed) / the hedge or the next waiter leads

ACQUIRING is one coroutine of `kcoord.agent.acquisition`, from the lease to the store. Where an artifact landed on this node is
remembered, for ranks that looked there a moment too early, or that have a directory each. If it is gone the claim comes `again`.

A claim that does not wait is Busy as soon as its key is being compiled, here or on another node; until then it waits, for the
artifact may be in the store. If nobody else waits, the flight ends. That another node has the lease is remembered for a moment:
ranks of one node that walk the same list do not each ask the lease service about each key.

A compile that takes longer than its key's claimants expect is *hedged* (Dean and Barroso, The Tail at Scale, 2013): one waiter of
this node compiles beside the leader, which is here or on another node. The files that land first are everybody's, and later
claims need not wait for the leader either. Each node that waits hedges for itself. If nothing is expected of a compile, its
waiters are *overdue* after `max_wait`, or four times that while a compile on this node is seen to work. Then one of them goes
ahead in the same way, once for each flight: the others wait for that one for as long again, and then all compile. If it was
another node that they waited for, this node waits for no other key of that lease's holder.

Invariants, held after every event:

- a key has at most one flight, and a flight at most one leader and one hedge;
- every claimant is in exactly one place (waiting, leading, hedging) until it has been answered once;
- a flight that is not LANDING and has neither waiters nor leader nor hedge does not exist;
- nobody waits, and nobody hedges, for a key that has landed;
- a token that is not the leader's or the hedge's changes nothing;
- a claim that does not wait is there while nobody leads: it never inherits a lead.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kcoord.latest import Latest
from kcoord.protocol.messages import BUSY, Alone, ClaimAnswer, Failed, Lead, Ready
from kcoord.settings import PATIENCE

_MOST_HOLDERS = 1000
_MOST_LANDED = 20_000


def never() -> float:
    return math.inf


@dataclass(frozen=True)
class Claimant:
    """One pending claim: `id` is its own, `owner` its connection's, `home` is where it wants the artifact. Its wait for a leader
    elsewhere, or for one that is idle, ends at `deadline`.

    ``slow_after()``: seconds of a compile after which it counts as slow, as far as is known now. The profile that tells may be
    read after the first claims, which are those of a cold start.
    """

    id: int
    owner: int
    key: str
    home: str
    who: str
    deadline: float
    waits: bool = True  # False: `Busy` rather than wait for another's compile
    slow_after: Callable[[], float] = never
    again: bool = False  # it was answered `Ready`, and the artifact was gone


# Actions. `serial` names the flight: the key's next flight has another.


@dataclass(frozen=True)
class Reply:
    """Answer a claim. `home`: where a `Ready` artifact is, which may be another one than the claimant's. `remembered`: it was
    there a while ago. `late`: the leader for which a `Lead` has waited in vain.
    """

    claimant: Claimant
    answer: ClaimAnswer
    home: str = ""
    late: str = ""
    remembered: bool = False


@dataclass(frozen=True)
class Acquire:
    """Take the key's lease and look in the store, or bring what another agent announces, to `home`. → `found`, `may_compile`,
    `failed_elsewhere`, and `must_wait` on the way."""

    key: str
    serial: int
    home: str


@dataclass(frozen=True)
class EndLease:
    """Stop acquiring, and release the lease uncompiled, or with this failure."""

    key: str
    serial: int
    failure: Failed | None = None


@dataclass(frozen=True)
class Upload:
    """The artifact is in the local tier at `home`: publish it in the store, then mark the lease READY.

    `manifest` is the SHA-256 of its manifest in the store, if it came from there and need not go there again.
    """

    key: str
    serial: int
    home: str
    manifest: str | None = None


Task = Acquire | EndLease | Upload
Action = Reply | Task


class State(enum.Enum):
    ACQUIRING = "asking"
    LEADING = "compiling"
    LANDING = "publishing"


@dataclass
class Attempt:
    """One rank's compile of a flight's key: the leader's, or the hedge's. `lands`: its files are being published. `works`: it was
    seen to use the CPU.
    """

    claimant: Claimant
    token: str
    since: float
    lands: bool = False
    works: bool = False


@dataclass
class Flight:
    key: str
    serial: int
    since: float
    slow_after: Callable[[], float] = never  # seconds of one leader's compile
    waiters: dict[int, Claimant] = field(default_factory=dict)
    leader: Attempt | None = None
    hedge: Attempt | None = None  # beside the leader, here or on another node
    hedge_from: float = math.inf  # start of the time that `slow_after` allows
    overdue: float | None = None  # when the waiters were past their deadlines, and one of them went ahead
    remote: str = ""  # the leader on another node, while ACQUIRING
    waited: bool = False  # another node compiled during this flight

    @property
    def state(self) -> State:
        if self.leader is None:
            return State.ACQUIRING
        return State.LANDING if self.leader.lands else State.LEADING

    @property
    def is_led(self) -> bool:
        """True while somebody compiles, here or on another node."""
        return self.state is State.LEADING or (self.state is State.ACQUIRING and bool(self.remote))

    def attempts(self) -> list[Attempt]:
        """The leader's and the hedge's, as far as there are any."""
        return [attempt for attempt in (self.leader, self.hedge) if attempt is not None]

    def attempt(self, token: str) -> Attempt | None:
        return next((attempt for attempt in self.attempts() if attempt.token == token), None)

    @property
    def late(self) -> str:
        """The leader's name, for people."""
        return self.leader.claimant.who if self.leader is not None else self.remote

    @property
    def has_successor(self) -> bool:
        """True while a waiter that went ahead of an overdue leader compiles."""
        if self.overdue is None:
            return False
        return self.hedge is not None or (self.leader is not None and self.leader.since >= self.overdue)

    def is_overdue(self, now: float, max_wait: float) -> bool:
        """True if a waiter is past its deadline, which is later while a compile on this node works."""
        return any(now >= w.deadline + self._longer(max_wait) for w in self.waiters.values())

    def end_waits(self, now: float, max_wait: float) -> list[Reply]:
        """Let one waiter compile; the others wait once more, for that one, and then compile."""
        replies, longer = self.succeed(now), self._longer(max_wait)
        for claimant in list(self.waiters.values()):
            ends = claimant.deadline
            if self.overdue is not None and self.has_successor:
                ends = max(ends, self.overdue + max_wait)
            if now >= ends + longer:
                del self.waiters[claimant.id]
                replies.append(Reply(claimant, Alone("waited as long as KCOORD_MAX_WAIT allows")))
        return replies

    def succeed(self, now: float) -> list[Reply]:
        """The leader is overdue: let the first waiter compile, unless one does already."""
        if self.overdue is None:
            self.overdue = self.hedge.since if self.hedge is not None else now
        claimant = None if self.has_successor else self._next_hedge()
        return [] if claimant is None else [self.hedged_by(claimant, now)]

    def hedged_by(self, claimant: Claimant, now: float) -> Reply:
        self.hedge = self.attempt_of(claimant, now)
        return Reply(claimant, Lead(self.hedge.token, hedges=True), late=self.late)

    def attempt_of(self, claimant: Claimant, now: float, works: bool = False) -> Attempt:
        """`claimant` waits no longer, and compiles."""
        del self.waiters[claimant.id]
        return Attempt(claimant, f"{self.serial}.{claimant.id}", now, works=works)

    def answer_all(self, answer: ClaimAnswer, home: str = "") -> list[Reply]:
        answers = [Reply(w, answer, home) for w in self.waiters.values()]
        self.waiters.clear()
        return answers

    def send_away(self) -> list[Reply]:
        """The key is being compiled: answer the claims that do not wait for that."""
        leaving = [w for w in self.waiters.values() if not w.waits]
        for claimant in leaving:
            del self.waiters[claimant.id]
        return [Reply(w, BUSY) for w in leaving]

    def due_hedge(self, now: float) -> Claimant | None:
        """The waiter that is to compile beside the leader, if that is slow by now."""
        due = self.hedge is None and self.is_led and now >= self.hedge_from + self.slow_after()
        return self._next_hedge() if due else None

    def _next_hedge(self) -> Claimant | None:
        """The first waiter of another process than the leader's."""
        slow = self.leader.claimant.who if self.leader is not None else ""
        return next((w for w in self.waiters.values() if w.who != slow), None)

    def _longer(self, max_wait: float) -> float:
        return (PATIENCE - 1) * max_wait if any(attempt.works for attempt in self.attempts()) else 0.0


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
        self._landed: Latest[str, str] = Latest(_MOST_LANDED)  # key → home
        self._elsewhere: dict[str, float] = {}  # key → until when another node is taken to compile it
        self.overdue: Latest[str, None] = Latest(_MOST_HOLDERS)  # holders of leases that were waited for in vain
        self._serial = 0

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    def homes(self) -> list[str]:
        """The homes on this node at which artifacts landed; the latest."""
        return list(self._landed.values())

    def get(self, key: str) -> Flight | None:
        return self._flights.get(key)

    def acquiring(self, key: str, serial: int) -> Flight | None:
        """The flight `serial` of `key`, as long as it has no leader."""
        flight = self._flights.get(key)
        return flight if flight is not None and flight.serial == serial and flight.state is State.ACQUIRING else None

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
        if claimant.again:
            self._landed.pop(key, None)
        if home := self._landed.get(key):
            return [Reply(claimant, Ready("store" if flight is None else "wait"), home, remembered=True)]
        if flight is not None:
            if not claimant.waits and (flight.remote or flight.attempts()):
                return [Reply(claimant, BUSY)]
            flight.waiters[claimant.id] = claimant
            return []
        if not claimant.waits and now < self._elsewhere.get(key, now):
            return [Reply(claimant, BUSY)]
        self._serial += 1
        flight = self._flights[key] = Flight(key, self._serial, now, claimant.slow_after)
        flight.waiters[claimant.id] = claimant
        return [Acquire(key, flight.serial, claimant.home)]

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
        self._failures.pop(key, None)
        self._elsewhere.pop(key, None)
        self._landed[key] = home
        flight = self._flights.get(key)
        if flight is None:
            self._serial += 1
            return [Upload(key, self._serial, home)]
        actions = flight.answer_all(Ready("wait"), home)
        if flight.state is State.LEADING:  # somebody else's landed first; the leader's own publish will be harmless
            flight.hedge_from, flight.hedge = math.inf, None
            return [*actions, Upload(key, 0, home)]
        return self._end(flight, *actions, Upload(key, flight.serial, home))

    def failed(self, key: str, token: str, log: str, where: str, now: float) -> list[Action]:
        """The leader reports that `key` does not compile: every waiter compiles it itself, at once and in parallel, to raise its
        own exception. A hedge's failure ends the hedge alone, for the leader will report its own, unless that one is overdue.
        """
        flight, others = self._led_by(key, token, now, or_succeeded=True)
        if flight is None:
            return others
        answer = self._remember(key, Failed(log, where), now)
        return self._end_awaited(flight, token, now, answer, EndLease(key, flight.serial, answer))

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
        """The compile with this token was seen to use the CPU: deadlines are later until it stalls."""
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

    # Events from `Acquire`. Nothing follows from one of an earlier flight (`serial`).

    def must_wait(self, key: str, serial: int, holder: str, now: float, until: float = 0.0) -> list[Action]:
        """Another node is compiling. Until the moment `until`, claims that do not wait are Busy without asking it again. If that
        node is overdue with another key, the first who waits compiles instead.
        """
        flight = self.acquiring(key, serial)
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
        return [*actions, *flight.send_away(), *self._end_if_deserted(flight)]

    def found(
        self, key: str, serial: int, home: str, manifest: str | None = None, *, packed: bool = False
    ) -> list[Action]:
        """The artifact is at `home`: another agent announced it, or, with `manifest`, the lease's holder found it in the store.

        `packed`: it came from a pack.
        """
        flight = self.acquiring(key, serial)
        if flight is None:
            return []
        self._elsewhere.pop(key, None)
        self._landed[key] = home
        answers = flight.answer_all(Ready("wait" if flight.waited else "pack" if packed else "store"), home)
        return self._end(flight, *answers, *([Upload(key, serial, home, manifest)] if manifest is not None else []))

    def may_compile(self, key: str, serial: int, now: float) -> list[Action]:
        """No node has the artifact or compiles it, as far as is known: a rank of this node is to compile."""
        flight = self.acquiring(key, serial)
        if flight is None:
            return [EndLease(key, serial)]
        self._elsewhere.pop(key, None)
        flight.remote = ""
        return self._next_leader(flight, now)

    def failed_elsewhere(self, key: str, serial: int, log: str, where: str, now: float) -> list[Action]:
        """Another node's compile failed."""
        flight = self.acquiring(key, serial)
        if flight is None:
            return []
        self._elsewhere.pop(key, None)
        return self._end(flight, *flight.answer_all(self._remember(key, Failed(log, where), now)))

    def derailed(self, key: str, serial: int) -> list[Action]:
        """A task of this flight ended in an unforeseen error: let the waiters go."""
        flight = self.acquiring(key, serial)
        if flight is None:
            return []
        answers = flight.answer_all(Alone("an error in the agent; its log has it"))
        return self._end(flight, *answers, EndLease(key, serial))

    def tick(self, now: float, *, may_hedge: bool = True) -> list[Action]:
        """Call it at least once a second: waits are bounded, and so is the time of a leader and a hedge.

        `may_hedge` False: no compile is hedged now, since nodes may be between two lease services.
        """
        actions: list[Action] = []
        for flight in list(self._flights.values()):
            actions += self._end_attempts(flight, now, lambda attempt: now - attempt.since > self._limit)
            if flight.is_overdue(now, self._max_wait):
                if flight.overdue is None and flight.remote:
                    self.overdue[flight.remote] = None
                actions += flight.end_waits(now, self._max_wait)
                if flight.attempts():
                    actions += flight.send_away()
                actions += self._end_if_deserted(flight)
            if may_hedge and (claimant := flight.due_hedge(now)) is not None:
                actions.append(flight.hedged_by(claimant, now))
        for key in [k for k, f in self._failures.items() if now >= f.until]:
            del self._failures[key]
        for key in [k for k, until in self._elsewhere.items() if now >= until]:
            del self._elsewhere[key]
        return actions

    # Shared by several events.

    def _attempt(self, key: str, token: str) -> Attempt | None:
        flight = self._flights.get(key)
        return None if flight is None else flight.attempt(token)

    def _remember(self, key: str, failure: Failed, now: float) -> Failed:
        self._failures[key] = _Failure(failure, now + self._failure_ttl)
        return failure

    def _end_awaited(self, flight: Flight, token: str, now: float, answer: ClaimAnswer, end: Action) -> list[Action]:
        """The compile with this token ended without an artifact. `end` is what becomes of the lease if it was the leader's."""
        answers = flight.answer_all(answer)
        if flight.leader is not None and flight.leader.token == token:
            return self._end(flight, *answers, end)
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
        """Make the hedge the leader, which compiles already; else the first waiter."""
        flight.hedge_from = now
        if flight.hedge is not None:
            flight.leader, flight.hedge = flight.hedge, None
            return [*flight.send_away()]
        if not flight.waiters:
            return self._end(flight, EndLease(flight.key, flight.serial))
        works = flight.leader is not None and flight.leader.works  # until it is seen what the next one does
        flight.leader = flight.attempt_of(next(iter(flight.waiters.values())), now, works)
        return [Reply(flight.leader.claimant, Lead(flight.leader.token)), *flight.send_away()]

    def _end_attempts(self, flight: Flight, now: float, is_over: Callable[[Attempt], bool]) -> list[Action]:
        """End the attempts that are over, but not those whose files are being published; then the flight, if nobody is left."""
        actions: list[Action] = []
        if flight.hedge is not None and not flight.hedge.lands and is_over(flight.hedge):
            actions += self._hedge_ended(flight, now)
        if flight.leader is not None and not flight.leader.lands and is_over(flight.leader):
            return [*actions, *self._next_leader(flight, now)]
        return [*actions, *self._end_if_deserted(flight)]

    def _hedge_ended(self, flight: Flight, now: float) -> list[Action]:
        """The hedge failed: the waiters go on waiting, and the next one hedges after a while."""
        if flight.is_led:
            flight.hedge_from = now
        flight.hedge = None
        return self._end_if_deserted(flight)

    def _end_if_deserted(self, flight: Flight) -> list[Action]:
        """End a flight in which nobody waits and nobody compiles."""
        if flight.waiters or flight.leader or flight.hedge or self._flights.get(flight.key) is not flight:
            return []
        return self._end(flight, EndLease(flight.key, flight.serial))

    def _end(self, flight: Flight, *actions: Action) -> list[Action]:
        del self._flights[flight.key]
        return list(actions)
