"""A launcher that lets other nodes live: some ranks of a larger world. ranks.py FIRST COUNT WORLD PROGRAM [ARGUMENT …]

A launcher that brings a whole job down with one of its nodes would leave nothing to look at. Fails if one of its ranks fails.
"""

from __future__ import annotations

import os
import subprocess
import sys

first, count, world = map(int, sys.argv[1:4])
started = []
for local in range(count):
    variables = {"RANK": str(first + local), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world)}
    started.append(subprocess.Popen([sys.executable, *sys.argv[4:]], env={**os.environ, **variables}))
sys.exit(max(abs(rank.wait()) for rank in started))
