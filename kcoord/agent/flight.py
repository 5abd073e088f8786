"""One flight: a key that is being compiled, by whom, and who waits for it. `kcoord.agent.flights` says what becomes of it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from kcoord.agent.actions import Claimant, IsReady


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
    hedge_after: float = math.inf  # seconds of one leader's compile
    state: State = State.ASKING
    waiters: dict[int, Claimant] = field(default_factory=dict)
    leader: Claimant | None = None
    token: str = ""
    led_since: float = 0.0
    landed: str = ""  # where the artifact is that somebody else landed first, while the leader is still at it
    hedge: Claimant | None = None  # who compiles beside the leader
    hedge_token: str = ""
    hedge_since: float = 0.0
    hedge_lands: bool = False  # its files are being published
    hedge_due: float = math.inf  # when the right to a hedge is to be asked for
    hedge_asked: bool = False  # it is being asked for now
    remote: str = ""  # who compiles on another node, while ASKING
    waited: bool = False  # somebody compiled while this flight was up
    manifest: str = ""  # what READY announced, while FETCHING

    @property
    def is_led(self) -> bool:
        """Whether somebody compiles, here or on another node."""
        return self.state is State.LEADING or (self.state is State.ASKING and bool(self.remote))

    @property
    def some_home(self) -> str:
        """Where one of those who want the artifact wants it."""
        claimant = next(iter(self.waiters.values()), self.hedge)
        assert claimant is not None  # else the flight would not exist
        return claimant.home

    def ready(self, home: str) -> IsReady:
        """What those who wait are told once the artifact is at `home`, found in the store or fetched from there."""
        return IsReady("wait" if self.waited else "store", home)

    def leads(self, token: str) -> bool:
        """Whether `token` is the leader's, who compiles, or whose files are being published."""
        return self.token == token and self.state in (State.LEADING, State.LANDING)

    def hedges(self, token: str) -> bool:
        """Whether `token` is the hedge's."""
        return self.hedge is not None and self.hedge_token == token

    def next_hedge(self) -> Claimant | None:
        """Who could compile beside the leader: another process than its own, which is as slow."""
        if not self.is_led:
            return None
        slow = self.leader.who if self.leader is not None else ""
        return next((w for w in self.waiters.values() if w.waits and w.who != slow), None)

    def needs_hedge(self, now: float) -> bool:
        """Whether the right to hedge is to be asked for now."""
        asks = self.hedge is None and not self.hedge_asked and now >= self.hedge_due
        return asks and self.next_hedge() is not None
