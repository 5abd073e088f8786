"""A rank that compiles what it is told to, batch by batch. batch_rank.py DIRECTORY WHO

For each file ``batch-N`` in the directory (``KERNELS SECONDS``; N counts from 0) it serves itself that many kernels, writes a
line into ``begun-N`` when it begins to compile one (kernel, who, when), and ``report-N-WHO``. It ends with the file ``end``.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import count
from pathlib import Path

import kcoord

directory, who = Path(sys.argv[1]), sys.argv[2]
coordinator = kcoord.connect()


def serve(batch: int, kernels: int, seconds: float) -> dict[str, list[float]]:
    compiled: list[float] = []
    served: list[float] = []
    for n in range(kernels):

        def compile(staging: Path, n: int = n) -> None:
            compiled.append(n)
            with (directory / f"begun-{batch}").open("a") as begun:
                begun.write(f"{n} {who} {time.monotonic()}\n")
            time.sleep(seconds)
            (staging / "kernel.bin").write_text(f"kernel {batch} {n}" * 100)

        key = kcoord.CacheKey.of("test", f"k{batch}-{n}", batch=batch, n=n)
        artifact = coordinator.get_or_compile(key, compile, scope=kcoord.Scope.TARGET)
        assert (artifact.path / "kernel.bin").read_text() == f"kernel {batch} {n}" * 100
        served.append(time.monotonic())
    return {"compiled": compiled, "served": served}


for batch in count():
    order = directory / f"batch-{batch}"
    while not order.exists() and not (directory / "end").exists():
        time.sleep(0.01)
    if not order.exists():
        break
    kernels, seconds = order.read_text().split()
    report = directory / f".report-{batch}-{who}"
    report.write_text(json.dumps(serve(batch, int(kernels), float(seconds))))
    report.rename(directory / f"report-{batch}-{who}")
coordinator.close()
