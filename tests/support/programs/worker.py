"""One worker of a job that compiles kernels and knows nothing of kcoord, whoever starts its process."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

KERNELS, WORKERS = 3, 2


def work(reports: str, number: int = 0) -> int:
    """Compile `KERNELS` kernels in the same moment as the other workers, and leave a report in the directory `reports`."""
    import triton

    import kernels

    compiled, loaded = [], []

    def listen(*, src, metadata, metadata_group, times, cache_hit):
        (loaded if cache_hit else compiled).append(metadata["hash"])

    triton.knobs.compilation.listener = listen
    place = Path(reports)
    arrive(place)
    built = [kernels.build_scale(factor + 2) for factor in range(KERNELS)]
    cubins = [hashlib.sha256(kernel.asm["cubin"]).hexdigest() for kernel in built]
    report = {"compiled": compiled, "loaded": loaded, "cubins": cubins}
    written = place / f".{os.getpid()}"
    written.write_text(json.dumps(report))
    written.rename(place / f"{os.getpid()}.json")
    return number


def arrive(place: Path) -> None:
    """Wait until `WORKERS` processes are here."""
    (place / f"{os.getpid()}.here").touch()
    wait_for_all(place, "*.here")


def leave(reports: str) -> None:
    """Wait until all workers have left their reports."""
    wait_for_all(Path(reports), "*.json")


def wait_for_all(place: Path, pattern: str) -> None:
    bound = time.monotonic() + 60
    while len(list(place.glob(pattern))) < WORKERS:
        assert time.monotonic() < bound, "the other workers did not come"
        time.sleep(0.005)
