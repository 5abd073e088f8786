"""From the compiler's SIGKILL to the next leader, on one node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.result import Result, spread
from kcoord.agent.client import AgentClient
from kcoord.keys.cache_key import CacheKey
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

_ROUNDS = 50

_RANK = """
import json, os, sys, time
from pathlib import Path
from kcoord.agent.client import AgentClient
from kcoord.keys.cache_key import CacheKey
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
name, fork = sys.argv[1], sys.argv[2] == "fork"
client = AgentClient(Settings.from_environ(), Notices())
print("asks", flush=True)
answer = client.claim(CacheKey.of("benchmark", name), Path(os.environ["KCOORD_LOCAL_DIR"]) / "homes" / name)
told = time.monotonic()
if fork and os.fork() == 0:
    os.close(1)
    time.sleep(3)  # with a copy of its parent's socket
    os._exit(0)
print(json.dumps([type(answer).__name__, told]), flush=True)
time.sleep(60)
"""


def run() -> Result:
    result = Result(
        "SIGKILL of the compiling rank to the next leader", ["the killed rank", "median ms", "p90 ms", "max ms"]
    )
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as directory:
        environment = {**os.environ, "KCOORD_LOCAL_DIR": directory, "KCOORD_IDLE_TIMEOUT": "2"}
        _ask(environment, {"op": "status"})  # starts the agent
        for label, kind in (("alone", "plain"), ("with a forked child alive", "fork")):
            times = [_round(environment, f"{kind}{n}", kind) for n in range(_ROUNDS)]
            result.rows.append([label, *spread(times)])
        _ask(environment, {"op": "stop"})
    result.notes.append(
        f"{_ROUNDS} rounds each; the second rank had been waiting; both clocks are the system's monotonic one"
    )
    result.notes.append("goal: a median below 100 ms; the lease's TTL plays no part, the agent sees the process end")
    return result


def _round(environment: dict[str, str], name: str, kind: str) -> float:
    first, second = (_start(environment, name, kind) for _ in range(2))
    try:
        assert first.stdout is not None
        assert second.stdout is not None
        state, _ = json.loads(first.stdout.readline())
        assert state == "Lead", state
        _until_waiting(environment, name)
        killed = time.monotonic()
        first.kill()
        state, told = json.loads(second.stdout.readline())
        assert state == "Lead", state
        return float((told - killed) * 1000)
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()


def _start(environment: dict[str, str], name: str, kind: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _RANK, name, kind]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "asks"
    time.sleep(0.05)  # the first one is to lead; what is measured does not depend on it
    return process


def _until_waiting(environment: dict[str, str], name: str) -> None:
    digest = CacheKey.of("benchmark", name).digest
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        flights = _ask(environment, {"op": "status"})["flights"]
        if any(f["key"] == digest and f["waiting"] for f in flights):
            return
        time.sleep(0.005)
    raise TimeoutError(f"nobody waits for {name}")


def _ask(environment: dict[str, str], request: dict[str, Any]) -> dict[str, Any]:
    client = AgentClient(Settings.from_environ(environment), Notices())
    try:
        reply = client.ask(request)
    finally:
        client.close()
    assert reply is not None
    return reply
