"""A rank under an mpirun of ``kcoord exec``: mpi_rank.py KERNELS DIRECTORY; prints one JSON line.

All ranks compile KERNELS together. Then, on each node, the rank whose launcher started the agent ends, and when its launcher has
ended too, the others compile one kernel more. DIRECTORY is where ranks see each other; its file `password` has what no command
line and no variable of a rank may have.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil

import kcoord
from kcoord.protocol.identity import Identity
from kcoord.rank.client import AgentClient
from kcoord.ranks import ranks_of
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

kernels, directory = int(sys.argv[1]), Path(sys.argv[2])
ranks, who = ranks_of(), Identity.here(os.environ.get("KCOORD_JOB"))
compiled: list[int] = []
coordinator = kcoord.connect()


def get(n: int) -> None:
    def compile(staging: Path) -> None:
        compiled.append(n)
        time.sleep(0.05)
        (staging / "kernel.bin").write_text(f"kernel {n}" * 100)

    coordinator.get_or_compile(kcoord.CacheKey.of("test", f"k{n}", n=n), compile, scope=kcoord.Scope.TARGET)


def agent() -> tuple[str, int]:
    client = AgentClient(replace(Settings.from_environ(), spawn=False), Notices())
    try:
        reply = client.status()
    finally:
        client.close()
    assert reply is not None
    return reply["agent"], reply["pid"]


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


for n in range(kernels):
    get(n)
(directory / f"here-{who.rank}").touch()
while len(list(directory.glob("here-*"))) < (ranks.world or 0):  # else the first to end might be the only one
    time.sleep(0.02)
name, pid = agent()
owner = psutil.Process(pid).ppid()
(directory / f"looked-{who.rank}").touch()
while len(list(directory.glob("looked-*"))) < (ranks.world or 0):
    time.sleep(0.02)
if owner != os.getppid():
    while runs(owner):
        time.sleep(0.02)
    get(kernels)
    assert agent()[0] == name, "it goes on for us"
secret = (directory / "password").read_text()
shown = [*(str(process.info["cmdline"]) for process in psutil.process_iter(["cmdline"])), *os.environ.values()]
report = {
    "rank": who.rank, "local": who.local_rank, "world": ranks.world, "job": who.job, "host": platform.node(),
    "agent": name, "owner": owner == os.getppid(), "compiled": compiled, "alone": coordinator.counters.read()["alone"],
    "leaks": sum(secret in text for text in shown),
}  # fmt: skip
coordinator.close()
sys.stdout.write(json.dumps(report) + "\n")  # in one piece: ranks share a pipe
