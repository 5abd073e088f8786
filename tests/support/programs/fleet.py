"""A launcher as small as can be. fleet.py RANKS PROGRAM [ARGUMENT …]: signals go on to all ranks; fails if one of them fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

count, program = int(sys.argv[1]), sys.argv[2:]
ranks: list[subprocess.Popen[bytes]] = []


def forward(number: int, frame: FrameType | None) -> None:
    for rank in ranks:
        rank.send_signal(number)


for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, forward)
for rank in range(count):
    environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    ranks.append(subprocess.Popen([sys.executable, *program], env=environment))
sys.exit(max(abs(rank.wait()) for rank in ranks))
