"""The way of a cold claim on two nodes, and of the publish that ends it: functions, files, calls, moves between files.

Two agents, two ranks, a real Redis, the generic API. Every process records its calls of kcoord's own functions
(`way_trace/sitecustomize.py`). The claim is traced from the first rank's request until the second one has its artifact, the
publish on the first node from the end of the compile until then: it holds the whole way into the store.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.result import Result
from tests.support.redis_server import RedisServer

ROUNDS = 5
SIZE = 1 << 20
"""Bytes of the artifact. Hashes of keys and manifests are far smaller."""

_LONG = 60  # lines of a function
_SETTLES = 0.5  # seconds in which the second node hears that it has to wait; asking its agent would be traced
_ROOT = Path(__file__).parents[1]

_RANK = """
import json, os, sys, time
import kcoord
coordinator = kcoord.connect()
size = int(sys.argv[1])

def compile(staging):
    told["compiles"] = time.monotonic()
    print("compiles", flush=True)
    sys.stdin.readline()
    (staging / "way.bin").write_bytes(os.urandom(size))
    told["compiled"] = time.monotonic()

for line in sys.stdin:
    told = {}
    key = kcoord.CacheKey.of("benchmark", line.strip())
    told["begins"] = time.monotonic()
    print("begins", flush=True)
    artifact = coordinator.get_or_compile(key, compile)
    told["has"] = time.monotonic()
    assert (artifact.path / "way.bin").stat().st_size == size
    print(json.dumps(told), flush=True)
print("ends", flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class Way:
    """What processes did in an interval: the medians of the rounds."""

    functions: int
    files: int
    calls: int
    moves: int


@dataclass(frozen=True)
class Traced:
    """`ways`: by interval ("claim" or "publish") and process ("rank A" … or "all"). `reads` and `hashes`: how often the
    first node read and hashed the artifact's bytes to publish them. `names`: the files on the way of a claim, relative to the
    repository. `long`: functions of more than 60 lines among them.
    """

    ways: dict[tuple[str, str], Way]
    reads: float
    hashes: float
    names: tuple[str, ...]
    long: tuple[str, ...]


def run() -> Result:
    traced = trace()
    result = Result("The way of a cold claim on two nodes", ["way", "process", "functions", "files", "calls", "moves"])
    for (interval, process), way in traced.ways.items():
        cells = [str(each) for each in (way.functions, way.files, way.calls, way.moves)]
        result.rows.append([interval, process, *cells])
    result.notes += [
        f"medians of {ROUNDS} claims, after a first one; kcoord's own functions, without comprehensions and module bodies",
        "claim: from the first rank's request until the second rank, which waits, has its artifact; publish: on the first node, "
        "from the end of the compile until then",
        "a resumed coroutine counts as a call of each function that awaits; moves: calls in another file than the call before",
        f"to publish {SIZE >> 20} MiB node A read the bytes {traced.reads:g} times and hashed them {traced.hashes:g} times",
        f"functions of more than {_LONG} lines on the way: {', '.join(traced.long) or 'none'}",
    ]
    return result


def trace(rounds: int = ROUNDS) -> Traced:
    with tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True) as root:
        told = _play(Path(root), rounds)
        processes = {name: _read(Path(root), pid) for name, pid in told["pids"].items()}
    ways: dict[tuple[str, str], list[Way]] = {}
    reads, hashes, names, long = [], [], set(), set()
    for leader, waiter in told["rounds"]:
        for interval, begin, end in (
            ("claim", leader["begins"], max(leader["has"], waiter["has"])),
            ("publish", leader["compiled"], max(leader["has"], waiter["has"])),
        ):
            parts = {name: [c for c in each["calls"] if begin <= c[0] <= end] for name, each in processes.items()}
            if interval == "publish":
                parts = {name: parts[name] for name in ("rank A", "agent A")}
            for name, calls in parts.items():
                ways.setdefault((interval, name), []).append(_way({name: calls}, processes))
            ways.setdefault((interval, "all"), []).append(_way(parts, processes))
            seen = {tuple(processes[name]["functions"][str(c[2])]) for name, calls in parts.items() for c in calls}
            names |= {_relative(file) for file, *_ in seen} if interval == "claim" else set()
            long |= {f"{_relative(f)}:{name} ({lines})" for f, name, _, lines in seen if lines > _LONG}
        node = [processes[name] for name in ("rank A", "agent A")]
        first, last = leader["compiled"], max(leader["has"], waiter["has"])
        reads.append(sum(first <= at <= last for each in node for at in each["opens"]))
        hashes.append(sum(size for each in node for at, size in each["hashed"] if first <= at <= last) // SIZE)
    medians = {
        key: Way(*(int(statistics.median(getattr(w, name) for w in found)) for name in Way.__annotations__))
        for key, found in ways.items()
    }
    return Traced(
        medians, statistics.median(reads), statistics.median(hashes), tuple(sorted(names)), tuple(sorted(long))
    )


def _way(parts: dict[str, list[Any]], processes: dict[str, Any]) -> Way:
    functions, files, calls, moves = set(), set(), 0, 0
    for name, found in parts.items():
        described = processes[name]["functions"]
        in_order = [described[str(number)] for _, thread, number in sorted(found, key=lambda call: (call[1], call[0]))]
        functions |= {tuple(each[:3]) for each in in_order}
        files |= {each[0] for each in in_order}
        calls += len(in_order)
        moves += sum(a[0] != b[0] for a, b in itertools.pairwise(in_order))
    return Way(len(functions), len(files), calls, moves)


def _relative(file: str) -> str:
    return os.path.relpath(file, _ROOT)


def _read(root: Path, pid: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "traces" / f"{pid}.json").read_text())
    return found


def _play(root: Path, rounds: int) -> dict[str, Any]:
    traces = root / "traces"
    traces.mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        shared = {
            "KCOORD_REDIS_URL": server.url,
            "KCOORD_STORE": str(root / "store"),
            "KCOORD_STORE_CREATE": "1",
            "WAY_TRACE": str(traces),
        }
        ranks = [stack.enter_context(_rank(root / name, shared)) for name in ("a", "b")]
        found = []
        for number in range(rounds + 1):
            leader, waiter = ranks
            _send(leader, f"k{number}", "begins", "compiles")
            _send(waiter, f"k{number}", "begins")
            time.sleep(_SETTLES)
            _send(leader, "go")
            found.append((json.loads(_line(leader)), json.loads(_line(waiter))))
        pids = {f"rank {name}": rank.pid for name, rank in zip("AB", ranks, strict=True)}
        pids |= {f"agent {name.upper()}": _agent(root / name, shared)["pid"] for name in ("a", "b")}
        (traces / "stop").touch()
        while not all((traces / f"{pid}.json").exists() for pid in pids.values()):
            time.sleep(0.05)
    return {"pids": pids, "rounds": found[1:]}


@contextmanager
def _rank(directory: Path, shared: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    directory.mkdir(mode=0o700)
    path = os.pathsep.join([str(_ROOT / "benchmarks" / "way_trace"), str(_ROOT), str(_ROOT / "launch")])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KCOORD_")}
    variables = {**kept, **shared, "PYTHONPATH": path, "KCOORD_LOCAL_DIR": str(directory), "KCOORD_IDLE_TIMEOUT": "30"}
    process = subprocess.Popen(
        [sys.executable, "-c", _RANK, str(SIZE)],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _send(rank: subprocess.Popen[str], line: str, *answers: str) -> None:
    assert rank.stdin is not None
    rank.stdin.write(line + "\n")
    rank.stdin.flush()
    for answer in answers:
        said = _line(rank)
        if said != answer:
            raise SystemExit(f"benchmark way: a rank said {said!r} and not {answer!r}")


def _line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline().strip()


def _agent(directory: Path, shared: dict[str, str]) -> dict[str, Any]:
    """The status of a node's agent, asked for by a process of its own that is not traced."""
    variables = {**os.environ, **shared, "WAY_TRACE": "", "KCOORD_LOCAL_DIR": str(directory)}
    command = [sys.executable, "-m", "kcoord", "status", "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, env=variables, check=True, capture_output=True).stdout)
    return found
