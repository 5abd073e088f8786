"""The cost of the lease script: microseconds of a real server's one thread for each call, as its own statistics give them."""

from __future__ import annotations

import statistics
from typing import Any

import redis

from benchmarks.result import Result
from kcoord.leases.redis import ACQUIRE, END, RENEW, Script
from tests.support.redis_server import RedisServer

_KEYS, _ROUNDS = 2000, 7
_US, _THEM = "L1a2b3c4d5e6f.flight-12\n15000\nnode-17", "Lf6e5d4c3b2a1.flight-7\n15000\nnode-4"
_TTL, _WEEK = 15_000, 604_800_000  # milliseconds
_MANIFEST = "5" * 64
_READY, _FAILED = f"R{_MANIFEST}", "F30000\nnode-17, rank 3\nptxas: no"
_CALLS: dict[str, tuple[Script, tuple[object, ...]]] = {  # in this order, on each key
    "acquire: won": (ACQUIRE, (_US, _TTL, "")),
    "acquire: wait": (ACQUIRE, (_THEM, _TTL, "")),
    "renew": (RENEW, (_US, _TTL)),
    "ready": (END, ("", _READY, _WEEK)),
    "acquire: ready": (ACQUIRE, (_THEM, _TTL, "")),
    "acquire: void, won": (ACQUIRE, (_US, _TTL, _MANIFEST)),
    "fail": (END, (_US, _FAILED, _TTL)),
    "acquire: failed": (ACQUIRE, (_THEM, _TTL, "")),
    "ready: again": (END, ("", _READY, _WEEK)),
    "acquire: void again": (ACQUIRE, (_US, _TTL, _MANIFEST)),
    "release": (END, (_US, "", 0)),
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
        for script in (ACQUIRE, RENEW, END):
            client.script_load(script.text)
        version = client.info("server")["redis_version"]
        for n in range(_ROUNDS):
            for name, (script, arguments) in _CALLS.items():
                found[name].append(_microseconds(client, script.sha, n, arguments))
            client.flushall()
    result.notes.append(f"redis-server {version}")
    result.rows += [[name, f"{statistics.median(each):.1f}", f"{min(each):.1f}"] for name, each in found.items()]
    return result


def _microseconds(client: redis.Redis, sha: str, number: int, arguments: tuple[Any, ...]) -> float:
    client.config_resetstat()
    pipe = client.pipeline(transaction=False)
    for key in range(_KEYS):
        pipe.evalsha(sha, 1, f"kcoord:default:lease:{number}:{key:064d}", *arguments)
    pipe.execute()
    found: dict[str, Any] = client.info("commandstats")
    return float(found["cmdstat_evalsha"]["usec_per_call"])
