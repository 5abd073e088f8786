"""Jobs for torch's compile workers, and a rank that has them done: it answers each line of its input, an expression.

In it ``jobs`` is this module, ``pool()`` the rank's pool, ``do(job, …)`` a job's result; ``soon(job, …)`` keeps a job's future in
``kept``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def where() -> tuple[int, int, str | None]:
    """The worker, the pool, and the rank as which the worker does this job."""
    return os.getpid(), os.getppid(), os.environ.get("RANK")


def sets(name: str) -> tuple[int, str | None]:
    """The worker, and what the variable `name` was; now it is set."""
    before = os.environ.get(name)
    os.environ[name] = "set"
    return os.getpid(), before


def held(file: str) -> int:
    """The process that did the job, once `file` exists. ``<file>.began`` tells that it has begun."""
    Path(f"{file}.began").touch()
    while not Path(file).exists():
        time.sleep(0.01)
    return os.getpid()


def dies(times: str, most: int) -> int:
    """Kills its worker `most` times, which are counted in a file."""
    with Path(times).open("a") as file:
        file.write(".")
    if Path(times).stat().st_size <= most:
        os.kill(os.getpid(), signal.SIGKILL)
    return Path(times).stat().st_size


def compiled(name: str) -> bool:
    """A compile of the generic API, which the worker's process asks kcoord for; True if it was there the compiler."""
    import kcoord

    made = []

    def compile(staging: Path) -> None:
        made.append(name)
        (staging / "file").write_text(name)

    key = kcoord.CacheKey.of("test", name, name=name)
    kcoord.connect().get_or_compile(key, compile, scope=kcoord.Scope.TARGET)
    return bool(made)


def leave_child() -> int:
    """A forked child of the rank, which outlives it."""
    child = os.fork()
    while not child:
        time.sleep(1)
    return child


def main() -> None:
    import kcoord

    kcoord.install()

    import torch._inductor.compile_fx
    from torch._inductor.async_compile import AsyncCompile

    torch._inductor.config.compile_threads = int(
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
    )  # it may be imported already
    import compile_jobs as jobs  # not `__main__`, where a worker would not find them

    kept: list[Any] = []
    names = {
        "jobs": jobs,
        "kept": kept,
        "pool": AsyncCompile.process_pool,
        "do": lambda *job: AsyncCompile.process_pool().submit(*job).result(timeout=60),
        "soon": lambda *job: kept.append(AsyncCompile.process_pool().submit(*job)),
    }
    for line in sys.stdin:
        try:
            answer = repr(eval(line, names))
        except Exception as error:  # noqa: BLE001 - it is the answer
            answer = repr(f"{type(error).__name__}: {error}")
        print(answer, flush=True)


if __name__ == "__main__":
    main()
