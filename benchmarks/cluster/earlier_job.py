"""A store as an earlier job left it: artifacts of the simulated compiler, and, if asked for, the profile's pack."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import redis

from benchmarks.cluster.light import publish
from benchmarks.cluster.node import key_of
from benchmarks.cluster.play import Kernels
from kcoord.artifacts.store import Store
from kcoord.leases.redis import RedisLeases
from kcoord.packs.index import Use
from kcoord.packs.recipe import Recipe, today
from kcoord.packs.recipe_files import save_part
from kcoord.packs.writing import write_pack

PROFILE = "cluster"
_AT_ONCE = 100


def fill(root: Path, kernels: Kernels, *, pack: bool) -> dict[str, str]:
    """Make the store at `root`. Returns the SHA-256 of each key's manifest, as READY announces it."""
    store = Store(root)
    store.open()
    manifests = {key_of(*kernel).digest: publish(store, *kernel) for kernel in kernels}
    if pack:
        recipes = [Recipe("simulated", "benchmarks", "kernel", name, "", seconds, 1) for name, seconds in kernels]
        save_part(root / "v2" / "profiles" / PROFILE, recipes)
        write_pack(store, PROFILE, [Use(digest, f"objects/{digest[:2]}/{digest}", today()) for digest in manifests])
    return manifests


def announce(url: str, manifests: dict[str, str]) -> None:
    """Say in Redis that the keys are READY, as for a week after a job. The news of it has expired, as 10 minutes later."""

    async def say() -> None:
        leases = RedisLeases(url, "default", ttl=15.0, limit=900.0, failure_ttl=30.0)
        said = list(manifests.items())
        for first in range(0, len(said), _AT_ONCE):
            await asyncio.gather(*(leases.ready(*each) for each in said[first : first + _AT_ONCE]))
        await leases.close()

    asyncio.run(say())
    with contextlib.closing(redis.Redis.from_url(url)) as client:
        for news in client.keys("kcoord:*:{*}:*"):
            client.delete(news)
