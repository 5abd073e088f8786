"""What goes into the flights and comes out of them: who claims, what a claimant is told, what the server is to do."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
    hedge_after: float = math.inf  # seconds of a compile after which it counts as slow
    again: bool = False  # it was told that it is ready, and it was gone


# What a claimant is told.


@dataclass(frozen=True)
class IsReady:
    """The artifact is in the local tier at `home`. `source`: ``store``, or ``wait`` if somebody compiled meanwhile."""

    source: str
    home: str


@dataclass(frozen=True)
class Leads:
    """Compile. `hedges`: somebody else is at it too, and slow."""

    token: str
    hedges: bool = False


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


@dataclass(frozen=True)
class AskHedge:
    """Ask for the right to compile beside a slow leader, which one rank of all nodes has; do not wait. → `hedge_answered`"""

    key: str
    serial: int


@dataclass(frozen=True)
class EndHedge:
    """Give that right back."""

    key: str
    serial: int


Errand = AskLease | Look | Fetch | EndLease | FailLease | Announce | AskHedge | EndHedge
Action = Tell | Errand
