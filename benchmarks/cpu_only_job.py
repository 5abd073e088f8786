"""One rank of the CPU-only cold start: real kernels for sm_90. ``cpu_only_job.py MODE KERNELS DIRECTORY``; RANK, WORLD_SIZE.

MODE as in `benchmarks.liger_job`: ``together``, ``rank0``, ``split``, ``profile``. Prints one line of JSON: wall seconds from the
first barrier to the last, CPU seconds of this process and of the assemblers that it started, compiles and loads.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import triton

from benchmarks.cluster.profile import build, cpu_seconds, kernels


def main(mode: str, count: str, directory: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meetings = itertools.count()

    def meet() -> None:
        place = Path(directory) / str(next(meetings))
        place.mkdir(exist_ok=True)
        (place / str(rank)).touch()
        while len(list(place.iterdir())) < world:
            time.sleep(0.002)

    every = list(kernels())
    mine = every[:: len(every) // int(count)][: int(count)]
    compiled: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(not cache_hit)

    def run(indices: Iterable[int]) -> None:
        for index in indices:
            _, kernel, constants, options = mine[index]
            build(kernel, constants, options)

    everything = range(len(mine))
    meet()
    begun, cpu = time.perf_counter(), cpu_seconds()
    if mode == "rank0":
        run(everything if rank == 0 else ())
        meet()
        run(() if rank == 0 else everything)
    else:
        if mode == "split":
            run(i for i in everything if i % world == rank)
            meet()
        if mode == "profile":
            import kcoord

            kcoord.warmup("cpu_only", progress=False)
        run(everything)
    cpu = cpu_seconds() - cpu
    meet()
    line = {"wall": time.perf_counter() - begun, "cpu": cpu, "compiles": sum(compiled), "loads": compiled.count(False)}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
