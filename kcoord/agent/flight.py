"""One flight: a key that is being compiled, by whom, and who waits for it. `kcoord.agent.flights` holds the transitions."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kcoord.agent.actions import Claimant, Reply, never
from kcoord.protocol.messages import Alone, ClaimAnswer, Lead, Ready
from kcoord.settings import PATIENCE


class State(enum.Enum):
    ASKING = "asking"
    LOOKING = "looking"
    FETCHING = "fetching"
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
    """`step` is the flight's state until it has a leader: ASKING, LOOKING or FETCHING."""

    key: str
    serial: int
    since: float
    slow_after: Callable[[], float] = never  # seconds of one leader's compile
    step: State = State.ASKING
    waiters: dict[int, Claimant] = field(default_factory=dict)
    leader: Attempt | None = None
    hedge: Attempt | None = None  # beside the leader, here or on another node
    hedge_from: float = math.inf  # start of the time that `slow_after` allows
    hedge_asked: bool = False  # it is being asked for
    overdue: float | None = None  # since when the waiters, who have waited for long enough, wait for one of them
    remote: str = ""  # the leader on another node, while ASKING
    waited: bool = False  # another node compiled during this flight
    manifest: str = ""  # announced by READY, while FETCHING
    packed: bool = False  # the artifact came from a pack

    @property
    def state(self) -> State:
        if self.leader is None:
            return self.step
        return State.LANDING if self.leader.lands else State.LEADING

    @property
    def hedge_due(self) -> float:
        """The moment at which to ask for the right to hedge, as far as is known now."""
        return self.hedge_from + self.slow_after()

    @property
    def is_led(self) -> bool:
        """True while somebody compiles, here or on another node."""
        return self.state is State.LEADING or (self.state is State.ASKING and bool(self.remote))

    @property
    def some_home(self) -> str:
        """A home at which the artifact is wanted."""
        claimant = next(iter(self.waiters.values()), self.hedge.claimant if self.hedge is not None else None)
        assert claimant is not None  # else the flight would not exist
        return claimant.home

    @property
    def ready(self) -> Ready:
        """The answer once the artifact was found in the store, or fetched from there or from a pack."""
        return Ready("wait" if self.waited else "pack" if self.packed else "store")

    def attempts(self) -> list[Attempt]:
        """The leader's and the hedge's, as far as there are any."""
        return [attempt for attempt in (self.leader, self.hedge) if attempt is not None]

    def attempt(self, token: str) -> Attempt | None:
        return next((attempt for attempt in self.attempts() if attempt.token == token), None)

    @property
    def late(self) -> str:
        """The leader that is waited for, for people."""
        return self.leader.claimant.who if self.leader is not None else self.remote

    @property
    def has_successor(self) -> bool:
        """True while one of those who were overdue compiles."""
        if self.overdue is None:
            return False
        return self.hedge is not None or (self.leader is not None and self.leader.since >= self.overdue)

    def next_hedge(self) -> Claimant | None:
        """The waiter that could compile beside the leader: not of the leader's own process, which is as slow."""
        slow = self.leader.claimant.who if self.leader is not None else ""
        return next((w for w in self.waiters.values() if w.who != slow), None)

    def is_overdue(self, now: float, max_wait: float) -> bool:
        """True if somebody has waited for long enough: until the deadline, and longer while a compile here works."""
        return any(now >= w.deadline + self._longer(max_wait) for w in self.waiters.values())

    def end_waits(self, now: float, max_wait: float) -> list[Reply]:
        """One of those who are overdue compiles; the others wait once more, for that one, and then compile."""
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
        """The leader is overdue: the first who waits compiles, unless somebody does since."""
        if self.overdue is None:
            self.overdue = self.hedge.since if self.hedge is not None else now
        claimant = None if self.has_successor else self.next_hedge()
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

    def _longer(self, max_wait: float) -> float:
        return (PATIENCE - 1) * max_wait if any(attempt.works for attempt in self.attempts()) else 0.0

    def needs_hedge(self, now: float) -> bool:
        """True if the right to hedge is to be asked for now."""
        asks = self.hedge is None and not self.hedge_asked and now >= self.hedge_due and self.is_led
        return asks and self.next_hedge() is not None
