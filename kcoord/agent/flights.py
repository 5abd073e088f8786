"""Flights: which key is being compiled on this node, by whom, and who waits for it.

A pure state machine: no I/O, no clock, no randomness. Every method takes an event and returns the actions that follow, in
order; the server carries them out and reports back what came of them. A flight's life::

    claim ──▶ ASKING ──Won──▶ LOOKING ──no──▶ LEADING ──landing──▶ LANDING ──landed──▶ (gone; all waiters Ready)
                │ ▲             │ yes           │ failed / leader gone
          Ready │ │ void        ▼               ▼
                ▼ │          (gone; Ready)   (gone; all Failed) / the next waiter leads
              FETCHING ──ok──▶ (gone; Ready)

A claim that does not wait is Busy if its key has a flight, else it begins one; if another node then turns out to have the
lease it is Busy too, and its flight is gone unless somebody else waits. That the other node has it is remembered for a moment:
ranks of one node that walk the same list do not each ask the lease service about each key.

Invariants, held after every event:

- a key has at most one flight, and a flight at most one leader;
- every claimant is in exactly one place (waiting, leading) until it has been answered once;
- a flight that is not LANDING and has neither waiters nor leader does not exist;
- a token that is not the leader's changes nothing;
- a claim that does not wait is the first of its flight, and is there while nobody compiles: it never inherits a lead.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from kcoord.leases.base import Failed, Ready, Won


@dataclass(frozen=True)
class Claimant:
    """One pending claim: `id` is its own, `owner` its connection's, `home` where it wants the artifact."""

    id: int
    owner: int
    key: str
    home: str
    who: str
    deadline: float
    waits: bool = True  # False: told `IsBusy` rather than wait for another's compile


# What a claimant is told.


@dataclass(frozen=True)
class IsReady:
    """The artifact is in the local tier at `home`. `source`: ``store``, or ``wait`` if somebody compiled meanwhile."""

    source: str
    home: str


@dataclass(frozen=True)
class Leads:
    token: str


@dataclass(frozen=True)
class HasFailed:
    log: str
    where: str


@dataclass(frozen=True)
class IsAlone:
    reason: str


@dataclass(frozen=True)
class IsBusy:
    """Somebody else is at it, here or on another node."""


Told = IsReady | Leads | HasFailed | IsAlone | IsBusy


# What the server is to do. `serial` names the flight: a key's next flight has another.


@dataclass(frozen=True)
class Tell:
    claimant: Claimant
    told: Told


@dataclass(frozen=True)
class AskLease:
    """Acquire the key's lease, or wait for another answer. → `lease_answered`"""

    key: str
    serial: int
    void: str | None = None


@dataclass(frozen=True)
class Look:
    """Look in the local tier, then in the store; bring it to `home`. → `looked`"""

    key: str
    serial: int
    home: str


@dataclass(frozen=True)
class Fetch:
    """Bring the announced artifact from the store to `home`. → `fetched`"""

    key: str
    serial: int
    home: str
    manifest: str


@dataclass(frozen=True)
class EndLease:
    """Release the lease uncompiled; stop whatever still runs for this flight."""

    key: str
    serial: int


@dataclass(frozen=True)
class FailLease:
    """End the lease with this failure."""

    key: str
    serial: int
    log: str
    where: str


@dataclass(frozen=True)
class Announce:
    """The artifact is in the local tier at `home`: publish it in the store, then mark the lease READY.

    `manifest` is the SHA-256 of its manifest in the store, if it came from there and need not go there again.
    """

    key: str
    serial: int
    home: str
    manifest: str | None = None


Errand = AskLease | Look | Fetch | EndLease | FailLease | Announce
Action = Tell | Errand


class State(enum.Enum):
    ASKING = "asking"
    LOOKING = "looking"
    FETCHING = "fetching"
    LEADING = "compiling"
    LANDING = "publishing"


@dataclass
class Flight:
    key: str
    serial: int
    since: float
    state: State = State.ASKING
    waiters: dict[int, Claimant] = field(default_factory=dict)
    leader: Claimant | None = None
    token: str = ""
    led_since: float = 0.0
    remote: str = ""  # who compiles on another node, while ASKING
    waited: bool = False  # somebody compiled while this flight was up
    manifest: str = ""  # what READY announced, while FETCHING


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
            if not claimant.waits:
                return [Tell(claimant, IsBusy())]
            flight.waiters[claimant.id] = claimant
            return []
        if not claimant.waits and now < self._elsewhere.get(key, now):
            return [Tell(claimant, IsBusy())]
        self._serial += 1
        flight = self._flights[key] = Flight(key, self._serial, now)
        flight.waiters[claimant.id] = claimant
        return [AskLease(key, flight.serial)]

    def landing(self, key: str, token: str) -> bool:
        """The leader hands in its files: from now on its death changes nothing. False: the token leads nothing."""
        flight = self._flights.get(key)
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
        leads_on = flight.state is State.LEADING  # somebody else's landed first; its own publish will be harmless
        actions = self._answer_all(flight, IsReady("wait", home))
        if leads_on:
            return [*actions, Announce(key, 0, home)]
        del self._flights[key]
        return [*actions, Announce(key, flight.serial, home)]

    def failed(self, key: str, token: str, log: str, where: str, now: float) -> list[Action]:
        """The leader says that `key` does not compile: every waiter finds out for itself, at once and in parallel."""
        flight = self._flights.get(key)
        if flight is None or flight.token != token or flight.state not in (State.LEADING, State.LANDING):
            return []
        del self._flights[key]
        self._failures[key] = _Failure(log, where, now + self._failure_ttl)
        return [
            *self._answer_all(flight, HasFailed(log, where)),
            FailLease(key, flight.serial, log, where),
        ]

    def given_up(self, key: str, token: str, now: float) -> list[Action]:
        """The leader will not compile after all; the next waiter leads."""
        flight = self._flights.get(key)
        if flight is None or flight.token != token or flight.state not in (State.LEADING, State.LANDING):
            return []
        return self._next_leader(flight, now)

    def gone(self, owner: int, now: float) -> list[Action]:
        """A connection ended, or its process died: its claims are void, and what it led is led by the next waiter."""
        actions: list[Action] = []
        for flight in list(self._flights.values()):
            for claimant in [w for w in flight.waiters.values() if w.owner == owner]:
                del flight.waiters[claimant.id]
            if flight.leader is not None and flight.leader.owner == owner and flight.state is State.LEADING:
                actions += self._next_leader(flight, now)
            else:
                actions += self._end_if_deserted(flight)
        return actions

    # Events from the lease service and the store. A `serial` that is not the flight's is yesterday's news.

    def must_wait(self, key: str, serial: int, holder: str, until: float = 0.0) -> list[Action]:
        """Another node is compiling. Until the moment `until`, claims that do not wait are Busy without asking it again."""
        flight = self._current(key, serial, State.ASKING)
        if flight is None:
            return []
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
        home = self._some_home(flight)
        if isinstance(answer, Won):
            flight.state = State.LOOKING
            return [Look(key, serial, home)]
        if isinstance(answer, Ready):
            flight.state, flight.manifest = State.FETCHING, answer.manifest
            return [Fetch(key, serial, home, answer.manifest)]
        del self._flights[key]
        self._failures[key] = _Failure(answer.log, answer.where, now + self._failure_ttl)
        return self._answer_all(flight, HasFailed(answer.log, answer.where))

    def looked(self, key: str, serial: int, found: str | None, now: float, manifest: str | None = None) -> list[Action]:
        """As the lease's holder: `found` is the home where the artifact is now, None if it is nowhere.

        `manifest` is its manifest's SHA-256 if it was in the store.
        """
        flight = self._current(key, serial, State.LOOKING)
        if flight is None:
            return []
        if found is None:
            return self._next_leader(flight, now)
        del self._flights[key]
        return [
            *self._answer_all(flight, self._ready(flight, found)),
            Announce(key, serial, found, manifest),
        ]

    def fetched(self, key: str, serial: int, found: str | None) -> list[Action]:
        """None if what READY announced is not to be had: then that READY is void, and we ask again."""
        flight = self._current(key, serial, State.FETCHING)
        if flight is None:
            return []
        if found is not None or not flight.waiters:
            del self._flights[key]
            return self._answer_all(flight, self._ready(flight, found or ""))
        flight.state = State.ASKING
        return [AskLease(key, serial, void=flight.manifest)]

    def tick(self, now: float) -> list[Action]:
        """Call it at least once a second: waits are bounded, and so is a leader's time."""
        actions: list[Action] = []
        for flight in list(self._flights.values()):
            for claimant in [w for w in flight.waiters.values() if now >= w.deadline]:
                del flight.waiters[claimant.id]
                actions.append(Tell(claimant, IsAlone("waited as long as KCOORD_MAX_WAIT allows")))
            if flight.state is State.LEADING and now - flight.led_since > self._limit:
                actions += self._next_leader(flight, now)
            else:
                actions += self._end_if_deserted(flight)
        for key in [k for k, f in self._failures.items() if now >= f.until]:
            del self._failures[key]
        for key in [k for k, until in self._elsewhere.items() if now >= until]:
            del self._elsewhere[key]
        return actions

    def derailed(self, serial: int) -> list[Action]:
        """An action of this flight failed in a way that nobody foresaw: let its waiters go."""
        for flight in self._flights.values():
            if flight.serial == serial and flight.state is not State.LEADING:
                del self._flights[flight.key]
                answers = self._answer_all(flight, IsAlone("an error in the agent; its log has it"))
                return [*answers, EndLease(flight.key, serial)]
        return []

    def _current(self, key: str, serial: int, state: State) -> Flight | None:
        flight = self._flights.get(key)
        return flight if flight is not None and flight.serial == serial and flight.state is state else None

    def _some_home(self, flight: Flight) -> str:
        return next(iter(flight.waiters.values())).home

    def _ready(self, flight: Flight, home: str) -> IsReady:
        return IsReady("wait" if flight.waited else "store", home)

    def _answer_all(self, flight: Flight, told: Told) -> list[Action]:
        answers: list[Action] = [Tell(w, told) for w in flight.waiters.values()]
        flight.waiters.clear()
        return answers

    def _next_leader(self, flight: Flight, now: float) -> list[Action]:
        if not flight.waiters:
            del self._flights[flight.key]
            return [EndLease(flight.key, flight.serial)]
        if flight.leader is not None:
            flight.waited = True
        flight.leader = flight.waiters.pop(next(iter(flight.waiters)))
        flight.token = f"{flight.serial}.{flight.leader.id}"
        flight.state, flight.led_since = State.LEADING, now
        return [Tell(flight.leader, Leads(flight.token))]

    def _end_if_deserted(self, flight: Flight) -> list[Action]:
        """Nobody waits and nobody leads. What is being looked up or fetched is let finish: it costs nothing more."""
        if flight.waiters or flight.leader is not None or flight.state is not State.ASKING:
            return []
        del self._flights[flight.key]
        return [EndLease(flight.key, flight.serial)]
