"""A store of many artifacts: the cost of a pass over it, and of a job beside it.

Its artifacts are real ones of two files each, published as an agent publishes, without waiting for the disk.
"""

from __future__ import annotations

import hashlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.result import Result
from kcoord.artifacts.manifest import FileEntry, Manifest, Origin
from kcoord.artifacts.store import Store
from kcoord.keys import CacheKey
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord.testing.stores import object_of

COUNTS = (1_000, 10_000, 100_000)
_LOOKUPS = 300
_STARTS = 5
_CLI = "from kcoord.cli import main; main()"


def run(counts: tuple[int, ...] = COUNTS) -> Result:
    result = Result("A store of many artifacts", ["what", *(f"{count:,}" for count in counts)])
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as directory:
        store = Store(Path(directory) / "store")
        store.open()
        made: list[str] = []
        columns = []
        for count in counts:
            while len(made) < count:
                made.append(_publish(store, len(made)))
            columns.append(_measure(store, made, Path(directory)))
    names = columns[0]
    result.rows = [[name, *(column[name] for column in columns)] for name in names]
    result.notes = [
        f"look-ups: `Store.fetch` of one artifact (found), and of a key that is not there; medians of {_LOOKUPS}",
        f"agent: the first answer of one that had to be started; median of {_STARTS}",
        "gc and ls: wall seconds of the command, and its largest resident memory; the page cache is warm",
        "a local disk; each artifact costs gc one listing of its directory, and ls one read of its manifest, so on NFS their "
        "time is that many round trips: not measured",
    ]
    return result


def _measure(store: Store, made: list[str], directory: Path) -> dict[str, str]:
    known = random.Random(0).sample(made, _LOOKUPS)
    unknown = [hashlib.sha256(digest.encode()).hexdigest() for digest in known]
    found = {"look-up, found": _median_ms(known, store.fetch), "look-up, not there": _median_ms(unknown, store.fetch)}
    found["agent's first answer"] = (
        f"{statistics.median(_start(store, directory) for _ in range(_STARTS)) * 1000:.0f} ms"
    )
    size = str(len(made) * 12288 // 2)
    for name, arguments in (
        ("gc --dry-run --max-size (half)", ("gc", "--dry-run", "--json", "--least-age", "0", "--max-size", size)),
        ("ls", ("ls",)),
        ("ls --json", ("ls", "--json")),
    ):
        found[name] = _command(store, directory, *arguments)
    return found


def _publish(store: Store, number: int) -> str:
    """The layout of `Store.publish` without its fsyncs, which do not affect the measurements."""
    content = random.Random(number).randbytes(2000)
    key = CacheKey.of("triton", f"kernel_{number % 500}", number=number).with_details({"triton": f"3.{number % 4}.0"})
    entry = FileEntry("kernel.cubin", len(content), hashlib.sha256(content).hexdigest())
    manifest = Manifest(key, (entry,), 1.5, Origin("node", 1, 0, "cuda:90#0", 1.7e9 + number))
    path = store.home(key.digest)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(object_of(manifest, {entry.name: content}))
    return key.digest


def _median_ms(digests: list[str], work: Callable[[str], object]) -> str:
    times = []
    for digest in digests:
        begun = time.perf_counter()
        work(digest)
        times.append(time.perf_counter() - begun)
    return f"{statistics.median(times) * 1e3:.2f} ms"


def _environment(store: Store, directory: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KCOORD_")}
    return {**clean, "KCOORD_STORE": str(store.root), "KCOORD_LOCAL_DIR": str(directory / "local")}


def _start(store: Store, directory: Path) -> float:
    client = AgentClient(Settings.from_environ(_environment(store, directory)), Notices())
    begun = time.perf_counter()
    status = client.status()
    took = time.perf_counter() - begun
    assert status is not None
    client.stop()
    client.close()
    while Path(f"/proc/{status['pid']}").exists():
        time.sleep(0.01)
    return took


_MEASURED = """
import os, resource, subprocess, sys, time
begun = time.perf_counter()
subprocess.run([sys.executable, "-c", *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
print(time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def _command(store: Store, directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, _CLI, *arguments],
        env=_environment(store, directory), check=True, capture_output=True, text=True,
    )  # fmt: skip
    seconds, kilobytes = done.stdout.split()
    return f"{float(seconds):.1f} s, {int(kilobytes) / 1024:.0f} MiB"
