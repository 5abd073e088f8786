"""One rank of the CPU-only cold start: real kernels for sm_90. ``cpu_only_job.py MODE KERNELS DIRECTORY``; RANK, WORLD_SIZE.

MODE as in `benchmarks.liger_job`: ``together``, ``rank0``, ``split``, ``profile``. Prints one line of JSON: wall seconds from the
first barrier to the last, CPU seconds of this process and of the assemblers that it started, compiles and loads.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.cluster.profile import kernels

SM90 = GPUTarget("cuda", 90, 32)


def build(kernel: Any, constants: dict[str, Any], options: dict[str, int]) -> None:
    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        return "*fp32" if name.endswith("_ptr") else "fp32" if name in ("scale", "eps") else "i32"

    signature = {name: kind(name) for name in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, k in enumerate(signature.values()) if k in ("*fp32", "i32")}
    triton.compile(ASTSource(kernel, signature, constexprs=constants, attrs=attrs), target=SM90, options=options)


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usages)


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
