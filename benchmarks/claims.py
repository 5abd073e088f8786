"""Claims of ready keys at one agent: how many a second, their CPU, and the agent's memory before and after them.

Connections send claims in batches, without a wait for each answer, for artifacts of the local tier: what ranks that start
together ask, at the most that one agent can take.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil

from benchmarks.result import Result
from kcoord.protocol import frames
from kcoord.rank.client import Lead
from tests.support.agents import Node, Wire, key_of, stage

_KEYS, _CONNECTIONS, _BATCH = 300, 4, 50


def run(claims: int = 1_000_000) -> Result:
    result = Result(
        "Claims of ready keys at one agent",
        ["claims", "claims a second", "agent's CPU, µs a claim", "memory before, MB", "memory after, MB"],
        notes=[f"{_CONNECTIONS} connections, {_BATCH} claims on the way on each; {_KEYS} keys of the local tier."],
    )
    with Node() as node:
        # an interpreter of its own: a forked agent has the imports of tests, too
        agent = psutil.Process(node.start(environ={"PYTHONHASHSEED": "0"}).pid)
        homes = [node.directory / "homes" / f"k{n}" for n in range(_KEYS)]
        for n, home in enumerate(homes):
            _compile(node, f"k{n}", home)
        _ask(node, homes, _KEYS * _CONNECTIONS)  # warm
        before, cpu = agent.memory_info().rss, sum(agent.cpu_times()[:2])
        begun = time.perf_counter()
        _ask(node, homes, claims)
        took, spent = time.perf_counter() - begun, sum(agent.cpu_times()[:2]) - cpu
        result.rows.append(
            [f"{claims:,}", f"{claims / took:,.0f}", f"{spent / claims * 1e6:.0f}", f"{before / 1e6:.1f}",
             f"{agent.memory_info().rss / 1e6:.1f}"]
        )  # fmt: skip
    return result


def _compile(node: Node, name: str, home: Path) -> None:
    client = node.client()
    lead = client.claim(key_of(name), home)
    assert isinstance(lead, Lead)
    assert client.publish(lead, key_of(name), stage(home), home, 0.5, "no device")
    client.close()


def _ask(node: Node, homes: list[Path], claims: int) -> None:
    threads = [
        threading.Thread(target=_connection, args=(node, homes, claims // _CONNECTIONS)) for _ in range(_CONNECTIONS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _connection(node: Node, homes: list[Path], claims: int) -> None:
    asked = [
        {"op": "claim", "digest": key_of(f"k{n}").digest, "backend": "test", "name": f"k{n}", "home": str(home)}
        for n, home in enumerate(homes)
    ]
    batch = [b"".join(frames.encode_frame({"id": n, **asked[(first + n) % len(asked)]}) for n in range(_BATCH))
             for first in range(0, len(asked), _BATCH)]  # fmt: skip
    with Wire(node.settings.socket_path, 120) as wire:
        wire.hello()
        for n in range(claims // _BATCH):
            wire.raw(batch[n % len(batch)])
            for _ in range(_BATCH):
                answer = wire.frame()
                assert answer["op"] == "ready", answer
