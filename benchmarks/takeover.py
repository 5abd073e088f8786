"""From the end of the compiling rank to the next leader: for each way to die, on one node and on another one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.result import Result, spread
from kcoord.keys.cache_key import CacheKey
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from tests.support.redis_server import RedisServer

_ROUNDS = 20
_DEATHS = {
    "SIGKILL": "time.sleep(60)",
    "SIGTERM": "time.sleep(60)",
    "os._exit": "os._exit(1)",
    "an exception (SystemExit)": "raise SystemExit(1)",
    "a segmentation fault": "ctypes.string_at(0)",
}
_SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM}

_RANK = """
import ctypes, json, os, resource, sys, time
from pathlib import Path
from kcoord.rank.client import AgentClient
from kcoord.keys.cache_key import CacheKey
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
name, forks, death = sys.argv[1:]
client = AgentClient(Settings.from_environ(), Notices())
print("asks", flush=True)
answer = client.claim(CacheKey.of("benchmark", name), Path(os.environ["KCOORD_LOCAL_DIR"]) / "homes" / name)
told = time.monotonic()
# as a C library forks: Python's hooks, which close the copy of the socket, do not run
if forks == "1" and ctypes.PyDLL(None).fork() == 0:
    os.close(0), os.close(1)
    time.sleep(3)
    os._exit(0)
print(json.dumps([type(answer).__name__, told]), flush=True)
sys.stdin.readline()
print(json.dumps(["dies", time.monotonic()]), flush=True)
exec(death)
"""


def run() -> Result:
    result = Result(
        "The end of the compiling rank to the next leader",
        ["it ended by", "the next leader is", "median ms", "p90 ms", "max ms"],
    )
    with _node() as here:
        for death in _DEATHS:
            for label, forks in ((death, False), (f"{death}, a forked child holds its socket", True)):
                times = [_round(here, here, death, forks) for _ in range(_ROUNDS)]
                result.rows.append([label, "of the same node", *spread(times)])
    with RedisServer() as server, tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as store:
        shared = {"KCOORD_REDIS_URL": server.url, "KCOORD_STORE": store, "KCOORD_STORE_CREATE": "1"}
        with _node(**shared) as here, _node(**shared) as there:
            for death in _DEATHS:
                times = [_round(here, there, death, False) for _ in range(_ROUNDS)]
                result.rows.append([death, "of another node", *spread(times)])
    result.notes += [
        f"{_ROUNDS} rounds each; the second rank had been waiting; both clocks are the system's monotonic one",
        "from the signal, or from the rank's last statement: an exception's row holds the interpreter's own end",
        "the OOM killer's end is SIGKILL; another node is another agent on this host, over a Redis of this host",
        f"load average of the machine at the end: {os.getloadavg()[1]:.1f} (5 minutes)",
        "goal: a median below 100 ms; the lease's TTL (15 s) plays no part, the agent sees the process end",
    ]
    return result


@contextmanager
def _node(**settings: str) -> Iterator[dict[str, str]]:
    """A node's environment; its agent runs."""
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as directory:
        environment = {**os.environ, "KCOORD_LOCAL_DIR": directory, "KCOORD_IDLE_TIMEOUT": "2", **settings}
        _ask(environment, AgentClient.status)  # starts it
        try:
            yield environment
        finally:
            _ask(environment, AgentClient.stop)


def _round(here: dict[str, str], there: dict[str, str], death: str, forks: bool) -> float:
    name = f"{time.monotonic_ns()}"
    first = _start(here, name, death, forks)
    second = None
    try:
        assert first.stdin is not None
        assert first.stdout is not None
        state, _ = json.loads(first.stdout.readline())
        assert state == "Lead", state
        second = _start(there, name, death, False)
        assert second.stdout is not None
        _until_waiting(there, name)
        if death in _SIGNALS:
            dies = time.monotonic()
            first.send_signal(_SIGNALS[death])
        else:
            first.stdin.write("die\n")
            first.stdin.flush()
            _, dies = json.loads(first.stdout.readline())
        state, told = json.loads(second.stdout.readline())
        assert state == "Lead", state
        return float((told - dies) * 1000)
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.communicate()


def _start(environment: dict[str, str], name: str, death: str, forks: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _RANK, name, str(int(forks)), _DEATHS[death]]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "asks"
    return process


def _until_waiting(environment: dict[str, str], name: str) -> None:
    digest = CacheKey.of("benchmark", name).digest
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        flights = _ask(environment, AgentClient.status)["flights"]
        if any(f["key"] == digest and f["waiting"] and f["leader"] for f in flights):
            return
        time.sleep(0.005)
    raise TimeoutError(f"nobody waits for {name}")


def _ask(environment: dict[str, str], request: Callable[[AgentClient], Any]) -> Any:
    client = AgentClient(Settings.from_environ(environment), Notices())
    try:
        reply = request(client)
    finally:
        client.close()
    assert reply is not None
    return reply
