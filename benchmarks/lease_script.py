"""The cost of the lease script: microseconds of a real server's one thread for each call, as its own statistics give them."""

from __future__ import annotations

import statistics
from typing import Any

import redis
from kcoord.leases.redis_script import SCRIPT

from benchmarks.result import Result
from tests.support.redis_server import RedisServer

_KEYS, _ROUNDS = 2000, 7
_US, _THEM = ("1a2b3c4d5e6f.flight-12", "node-17"), ("f6e5d4c3b2a1.flight-7", "node-4")
_TTL, _LIMIT, _WEEK = 15_000, 900_000, 604_800_000  # milliseconds
_MANIFEST = "5" * 64
_CALLS: dict[str, tuple[object, ...]] = {  # in this order, on each key
    "acquire: won": ("acquire", *_US, _TTL, _LIMIT, ""),
    "acquire: wait": ("acquire", *_THEM, _TTL, _LIMIT, ""),
    "look: wait": ("look", ""),
    "renew": ("renew", _US[0], _TTL, _US[1], _LIMIT),
    "ready": ("ready", "", _MANIFEST, _WEEK),
    "acquire: ready": ("acquire", *_THEM, _TTL, _LIMIT, ""),
    "acquire: void, won": ("acquire", *_US, _TTL, _LIMIT, _MANIFEST),
    "fail": ("fail", _US[0], "ptxas: no", "node-17, rank 3", _TTL),
    "acquire: failed": ("acquire", *_THEM, _TTL, _LIMIT, ""),
    "ready: again": ("ready", "", _MANIFEST, _WEEK),
    "acquire: void again": ("acquire", *_US, _TTL, _LIMIT, _MANIFEST),
    "release": ("release", _US[0]),
}


def run() -> Result:
    result = Result(
        "The lease script: microseconds of Redis' thread for each call",
        ["call", "µs, median", "µs, least"],
        notes=[
            f"`INFO commandstats`, {_KEYS} keys in each of {_ROUNDS} rounds; reading and sending come on top",
            "an agent asks by `acquire`; the others are once for each key, or once in 5 s while it is compiled",
        ],
    )
    found: dict[str, list[float]] = {name: [] for name in _CALLS}
    with RedisServer() as server, redis.Redis.from_url(server.url, protocol=2) as client:
        sha = client.script_load(SCRIPT)
        version = client.info("server")["redis_version"]
        for n in range(_ROUNDS):
            for name, arguments in _CALLS.items():
                found[name].append(_microseconds(client, sha, n, arguments))
            client.flushall()
    result.notes.append(f"redis-server {version}")
    result.rows += [[name, f"{statistics.median(each):.1f}", f"{min(each):.1f}"] for name, each in found.items()]
    return result


def _microseconds(client: redis.Redis, sha: str, number: int, arguments: tuple[Any, ...]) -> float:
    client.config_resetstat()
    pipe = client.pipeline(transaction=False)
    for key in range(_KEYS):
        pipe.evalsha(sha, 1, f"kcoord:{{default}}:lease:{number}:{key:064d}", *arguments)
    pipe.execute()
    found: dict[str, Any] = client.info("commandstats")
    return float(found["cmdstat_evalsha"]["usec_per_call"])
