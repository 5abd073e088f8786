"""The table of faults: what can be thrown, how long it lasts, and what it excuses.

A fault excuses two things, and nothing else does: seconds by which the round ends later, and compiles of a key that is
compiled more than once. Both are bounds that follow from what kcoord promises, not figures that were seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEASE_TTL = 3.0  # seconds, as all below: what the nodes of a round are told
LEASE_LIMIT = 6.0
MAX_WAIT = 12.0
FAILURE_TTL = 1.0
AGENT_TIMEOUT = 3.0
IDLE_TIMEOUT = 2.0
STALL = 2.0
HEDGE_AFTER = 1.5  # the slowest compile takes a third of it
RANKS = 4  # of a node
SLOW = 3  # go ahead of a leader that gets nowhere: the next one, and a hedge on each node, if all happen in one moment

_RANK_STARTS = 2.0
_AGENT_STARTS = 2.0
_DEAD = 5.0  # a rank that found its agent dead does not ask it for so long (kcoord.rank.client)
_REDIS_BACK = 7.0  # one node learns so much later than another that Redis is gone, or back
_REDIS_SILENT = 6.0  # a re-check, and two commands that time out
_STORE_BACK = 6.0  # so much later a node uses its store, and the lease files in it, again
_MOMENT = 0.3  # what a fault sets off is over so soon

SETTINGS = {
    "KCOORD_LEASE_TTL": LEASE_TTL,
    "KCOORD_LEASE_LIMIT": LEASE_LIMIT,
    "KCOORD_MAX_WAIT": MAX_WAIT,
    "KCOORD_FAILURE_TTL": FAILURE_TTL,
    "KCOORD_AGENT_TIMEOUT": AGENT_TIMEOUT,
    "KCOORD_IDLE_TIMEOUT": IDLE_TIMEOUT,
    "KCOORD_STALL_SECONDS": STALL,
    "KCOORD_HEDGE_AFTER": HEDGE_AFTER,
}


@dataclass(frozen=True)
class Kind:
    """One row. `hits` is what a fault of it meets: ``rank``, ``node``, ``all`` or ``key``.

    It excuses `costs` seconds besides those that it lasts, of which it holds up another rank's request for `holds` (None: all).
    However long it lasts, within `noticed` seconds whoever waits goes on without what it has hit; `noticed_here`: a rank of the
    node that it hits. It excuses `duplicates` more compiles of a key that is compiled while it lasts, or until `after` seconds
    later; and each compile that a rank of its node does alone, without an agent, until `alone` seconds later. `why` says where
    the duplicates come from.
    """

    name: str
    hits: str
    costs: float
    duplicates: int = 0
    after: float = 0.0
    alone: float = 0.0
    why: str = ""
    lasts: tuple[float, float] = (0.0, 0.0)
    details: tuple[str, ...] = ("",)
    needs: str = ""  # "redis" or "store"
    weight: float = 1.0
    holds: float | None = None
    noticed: float = math.inf
    noticed_here: float = math.inf


_DIES = _RANK_STARTS + 1.0
_AGENT_GONE = "the ranks of the node that compile now lose their lease, and one that meets no agent compiles alone"

_ALL = (
    # A compile that its rank does not live to hand in is no duplicate: it is not counted at all.
    Kind("rank-kill", "rank", _DIES, weight=3, holds=_MOMENT),
    Kind("rank-term", "rank", _DIES, holds=_MOMENT),
    Kind("rank-dies-compiling", "rank", _DIES, details=("kill", "exit", "segfault", "term"), weight=4, holds=_MOMENT),
    Kind(
        "rank-raises", "rank", _DIES + FAILURE_TTL, 2 * RANKS, weight=1.5, holds=_MOMENT,
        why="every rank that asks while the failure is remembered compiles for itself, to raise its own exception",
    ),
    Kind(
        "rank-stop", "rank", 1.0, SLOW, 1.0, AGENT_TIMEOUT + _DEAD, lasts=(0.1, 8.0), weight=3, noticed=LEASE_LIMIT,
        why="a leader that stands still is passed by at its lease's limit, and hedged before it; one that stands still while it "
        "starts the agent holds the others' start up for KCOORD_AGENT_TIMEOUT, and they go on alone",
    ),
    Kind(
        "agent-kill", "node", _AGENT_STARTS + LEASE_TTL, RANKS, _MOMENT, _AGENT_STARTS + AGENT_TIMEOUT + _DEAD, _AGENT_GONE,
        weight=3,
    ),
    Kind(
        "agent-term", "node", _AGENT_STARTS + LEASE_TTL, RANKS, _MOMENT, _AGENT_STARTS + AGENT_TIMEOUT + _DEAD, _AGENT_GONE,
        weight=1.5,
    ),
    Kind(
        "agent-stop", "node", 2 * AGENT_TIMEOUT + LEASE_TTL, RANKS, _MOMENT, AGENT_TIMEOUT + _DEAD, lasts=(0.1, 8.0),
        why="silent for longer than KCOORD_AGENT_TIMEOUT it is dead to its ranks, and beyond the TTL so are its leases",
        weight=3, holds=_MOMENT, noticed=LEASE_TTL + 2.0, noticed_here=AGENT_TIMEOUT + 1.0,
    ),
    Kind(
        "agent-hang", "node", 2 * AGENT_TIMEOUT + LEASE_TTL, RANKS, _MOMENT, AGENT_TIMEOUT + _DEAD, lasts=(10.0, 15.0),
        why="as agent-stop", weight=3, holds=_MOMENT, noticed=LEASE_TTL + 2.0, noticed_here=AGENT_TIMEOUT + 1.0,
    ),
    Kind("agent-frames", "node", 0.5, details=("noise", "huge", "half", "future", "silent", "foreign"), lasts=(0.5, 3.0)),
    Kind(
        "clock-step", "node", 1.0, details=("+600", "-600"), lasts=(0.5, 8.0),
    ),
    Kind(
        "tmp-full", "node", _AGENT_STARTS, RANKS, _MOMENT, _AGENT_STARTS + AGENT_TIMEOUT, lasts=(0.5, 8.0), weight=2,
        why="a rank that starts meanwhile looks for the agent in another temporary directory, and starts one there",
    ),
    Kind("tmp-noexec", "node", 0.5, lasts=(0.5, 8.0), weight=2),
    Kind(
        "tmp-new", "node", _AGENT_STARTS, RANKS, math.inf, _AGENT_STARTS + AGENT_TIMEOUT, weight=2,
        why="ranks that start later meet no agent and start one: from then on two lead on this node",
    ),
    Kind(
        "local-removed", "node", 3.0, RANKS, math.inf, _AGENT_STARTS + AGENT_TIMEOUT + _DEAD, weight=2,
        why="the node's artifacts that no store has are compiled again, each by whoever was told that it is there",
    ),
    Kind(
        "redis-kill", "all", 8.0, 1, _REDIS_BACK, lasts=(0.0, 3.0), needs="redis", weight=2,
        why="for a moment one node asks Redis and the other lease files",
    ),
    Kind(
        "redis-stop", "all", 8.0, 1, _REDIS_BACK, lasts=(0.1, 6.0), needs="redis", weight=2, why="as redis-kill",
        holds=LEASE_TTL, noticed=_REDIS_SILENT,
    ),
    Kind(
        "redis-hang", "all", 8.0, 1, _REDIS_BACK, lasts=(12.0, 18.0), needs="redis", weight=2, why="as redis-kill",
        holds=LEASE_TTL, noticed=_REDIS_SILENT,
    ),
    Kind("redis-flush", "all", 2.0, 1, _MOMENT, needs="redis", why="a lease is unknown until its holder renews it"),
    Kind("redis-script-flush", "all", 1.0, needs="redis"),
    Kind("redis-cut", "all", 3.0, details=("normal", "pubsub"), needs="redis"),
    Kind("redis-full", "all", 8.0, 1, _REDIS_BACK, lasts=(0.5, 4.0), needs="redis", why="as redis-kill"),
    Kind(
        "redis-garbage", "key", 8.0, 1, details=("string", "list", "fields", "ready", "half"), needs="redis",
        why="the key's lease is overwritten",
    ),
    Kind(
        "redis-clock", "all", LEASE_TTL + 1.0, 1, _MOMENT, details=("+600", "-600"), lasts=(0.5, 8.0), needs="redis",
        why="a step forward ends every lease",
    ),
    Kind(
        "store-fails", "node", 3.0, 1, _STORE_BACK, lasts=(0.5, 5.0), needs="store", weight=3,
        details=("EROFS", "ENOSPC", "EDQUOT", "EACCES", "EIO", "ESTALE", "EIO-once", "ESTALE-once", "no-links", "lost-link"),
        why="what could not be published or read in time is compiled by the other node",
    ),
    Kind(
        "store-fails-everywhere", "all", 3.0, 1, _STORE_BACK, why="as store-fails",
        lasts=(0.5, 5.0), details=("EROFS", "ENOSPC", "EIO"), needs="store",
    ),
    Kind(
        "store-stalls", "node", 2.0, 1, _STORE_BACK, lasts=(0.5, 4.0), details=("open", "link", "fsync"), needs="store",
        why="as store-fails",
    ),
    Kind(
        "artifact-in-store", "key", 3.0, 1, details=("truncated", "flipped", "removed"), needs="store", weight=3,
        why="whoever needs it next compiles it again",
    ),
    Kind(
        "artifact-on-node", "key", 3.0, RANKS, details=("truncated", "flipped", "removed"), weight=3,
        why="whoever was told that it is there, and finds it gone, compiles it alone",
    ),
)  # fmt: skip

KINDS = {kind.name: kind for kind in _ALL}
