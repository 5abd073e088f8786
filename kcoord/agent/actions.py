"""The claimants of flights, and the actions that follow from their events."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kcoord.protocol.messages import ClaimAnswer


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
    missed: int = 0  # the landing that answered its last claim, whose artifact was not there


@dataclass(frozen=True)
class Reply:
    """Answer a claim. `home`: where a `Ready` artifact is, which may be another one than the claimant's. `late`: the leader for
    which a `Lead` has waited in vain.
    """

    claimant: Claimant
    answer: ClaimAnswer
    home: str = ""
    late: str = ""


@dataclass(frozen=True)
class _Task:
    """Work on a key's lease and artifact. `serial` names the flight: the key's next flight has another. → names the event that
    follows."""

    key: str
    serial: int


@dataclass(frozen=True)
class AskLease(_Task):
    """Acquire the key's lease, or wait for another answer. → `lease_answered`"""

    void: str | None = None


@dataclass(frozen=True)
class Look(_Task):
    """Look in the store; bring the artifact to `home`. → `looked`"""

    home: str


@dataclass(frozen=True)
class Fetch(_Task):
    """Bring the announced artifact from the store to `home`. → `fetched`"""

    home: str
    manifest: str


@dataclass(frozen=True)
class EndLease(_Task):
    """Release the lease uncompiled; stop whatever still runs for this flight."""


@dataclass(frozen=True)
class FailLease(_Task):
    """End the lease with this failure."""

    log: str
    where: str


@dataclass(frozen=True)
class Announce(_Task):
    """The artifact is in the local tier at `home`: publish it in the store, then mark the lease READY.

    `manifest` is the SHA-256 of its manifest in the store, if it came from there and need not go there again.
    """

    home: str
    manifest: str | None = None


@dataclass(frozen=True)
class AskHedge(_Task):
    """Ask for the right to compile beside a slow leader, which one rank of all nodes has; do not wait. → `hedge_answered`"""


@dataclass(frozen=True)
class EndHedge(_Task):
    """Give that right back."""


LeaseTask = AskLease | Look | Fetch | EndLease | FailLease | Announce | AskHedge | EndHedge
Action = Reply | LeaseTask
