"""A rank of the generic API. generic_rank.py KERNELS [SECONDS]; prints one JSON line."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import kcoord

kernels, seconds = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.02
compiled: list[int] = []
served: list[str] = []
coordinator = kcoord.connect()
for n in range(kernels):

    def compile(staging: Path, n: int = n) -> None:
        compiled.append(n)
        if "BEGUN" in os.environ:
            Path(os.environ["BEGUN"]).touch()
        time.sleep(seconds)
        (staging / "kernel.bin").write_text(f"kernel {n}" * 100)

    key = kcoord.CacheKey.of("test", f"k{n}", n=n)
    artifact = coordinator.get_or_compile(key, compile, scope=kcoord.Scope.TARGET)
    assert (artifact.path / "kernel.bin").read_text() == f"kernel {n}" * 100
    served.append(str(artifact.path))
coordinator.close()
report = {"compiled": compiled, "counters": coordinator.counters.read(), "served": served}
sys.stdout.write(json.dumps(report) + "\n")  # in one piece: ranks share a pipe
