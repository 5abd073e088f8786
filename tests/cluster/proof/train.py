"""A rank: it needs all kernels, and begins with another one than its neighbours. train.py KERNELS; prints one JSON line."""

from __future__ import annotations

import json
import os
import sys

import kcoord
from tests.cluster.proof.kernels import content, make, note

kernels, rank, world = int(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for step in range(kernels):
    n = (rank * kernels // world + step) % kernels
    note("asks", n)
    artifact = make(n)
    if (artifact.path / "kernel.bin").read_bytes() != content(n):
        sys.exit(f"rank {rank} was given wrong bytes for kernel {n}")
    note("has", n)
coordinator = kcoord.connect()
coordinator.close()
line = {"rank": rank, "kernels": kernels, "counters": coordinator.counters.read()}
sys.stdout.write(json.dumps(line) + "\n")  # in one piece: ranks share a pipe
