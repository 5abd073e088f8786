"""Time dilation: a cluster whose clock runs slower than the machine that plays it, so that the machine's cores are not its limit.

Compiles, the NFS server and kcoord's own waits take `factor` times as long; only computing takes as long as ever. Every duration
divided by the factor is then that of a cluster whose cores are faster by the factor (Gupta et al., "To infinity and beyond:
time-warped network emulation", NSDI 2006).
"""

from __future__ import annotations

import functools

MOST = 100.0  # a lease of half an hour


def dilate(factor: float, patience: float = 1.0) -> None:
    """Make the waits of this process' agents and leases longer by `factor`, before there are any.

    `patience`: by which they wait longer still for Redis' answers, in a process that has more of them than a core has time for.
    """
    if not 1 <= factor <= MOST:
        raise ValueError(f"a dilation is from 1 to {MOST:g}")
    from kcoord.agent import acquisition, packs, tiers
    from kcoord.agent.chores import packing, profiles, sweeping, timelines
    from kcoord.leases import base, redis, redis_client

    for module, names in (
        (base, ("RECHECK",)),
        (acquisition, ("_BUSY_FOR",)),
        (packs, ("_PATIENCE",)),
        (profiles, ("_EVERY",)),
        (sweeping, ("FIRST_IN_STORE",)),
        (timelines, ("_SHARE_EVERY",)),
    ):
        for name in names:
            setattr(module, name, getattr(module, name) * factor)
    tiers.StoreBreaker = functools.partial(tiers.StoreBreaker, patience=60 * factor)  # type: ignore[misc,assignment]
    for name in ("quiet", "every"):
        packing.PackWriter.__init__.__kwdefaults__[name] *= factor
    redis_client._CONNECT_TIMEOUT *= factor * patience  # type: ignore[misc]
    redis.SILENCE *= factor * patience  # type: ignore[misc]
    redis.DISTANCE *= factor  # type: ignore[misc]


def settings(factor: float) -> dict[str, str]:
    """kcoord's settings of durations, dilated."""
    return {
        "hedge_after": f"{10 * factor:g}",
        "lease_ttl": f"{15 * factor:g}",
        "lease_limit": f"{900 * factor:g}",
        "failure_ttl": f"{30 * factor:g}",
    }
