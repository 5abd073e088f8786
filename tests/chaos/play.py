"""One round, played: two nodes, a Redis and a store of their own, the faults when they are due, and an end within the bound."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kcoord.packs.recipe_files import roots, save_part
from tests.chaos import judge
from tests.chaos.compiler import recipe_of
from tests.chaos.judge import Verdict
from tests.chaos.kinds import IDLE_TIMEOUT
from tests.chaos.schedule import Fault, Round
from tests.chaos.site import Site
from tests.chaos.throw import Thrower, Thrown
from tests.support.interpose import Interposer
from tests.support.redis_server import RedisServer

_LOOKS = 0.02  # seconds between two looks at the clock
_NOT_THERE = 20.0  # seconds that a fault waits for its artifact
_DRAINS = 25.0  # seconds that an agent may take to end: it finishes what it publishes


@dataclass(frozen=True)
class Place:
    """Where a round is played. `library`: the interposer's, None without a C compiler. What failed is kept in `keep`;
    `keeps_all`: what held, too."""

    library: Path | None
    keep: Path
    keeps_all: bool = False


def play(round_: Round, place: Place) -> Verdict:
    directory = Path(tempfile.mkdtemp(prefix="kc-", dir="/tmp"))  # a socket's path is short
    try:
        try:
            verdict = _play(round_, place, directory)
        except BaseException:
            print(f"the harness itself failed; kept: {_keep(round_, place, directory)}", flush=True)
            raise
        if verdict.findings or place.keeps_all:
            verdict.kept = _keep(round_, place, directory)
        return verdict
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _keep(round_: Round, place: Place, directory: Path) -> Path:
    kept = place.keep / f"{round_.seed}-{round_.number}"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(directory, kept, symlinks=True, ignore=_sockets)
    return kept


def _sockets(directory: str, names: list[str]) -> list[str]:
    return [n for n in names if Path(directory, n).is_socket()]


def _play(round_: Round, place: Place, directory: Path) -> Verdict:
    (directory / "round.json").write_text(round_.encode())
    (directory / "stacks").mkdir()
    with contextlib.ExitStack() as stack:
        redis, redis_clock = None, None
        if round_.mode == "redis":
            if place.library is not None:
                (directory / "ir").mkdir()
                redis_clock = Interposer(place.library, directory / "ir")
            redis = stack.enter_context(RedisServer(environ=redis_clock.environ if redis_clock is not None else None))
        store = None if round_.mode == "node" else directory / "store"
        url = redis.url if redis is not None else None
        sites = [
            Site(directory, n, round_.launcher, url, store, place.library, round_.named) for n in range(round_.nodes)
        ]
        for site in sites:
            stack.callback(site.end)
            save_part(roots(None, site.local)[0] / "chaos", map(recipe_of, round_.kernels))
        if round_.leftovers:
            _leave(directory, store, sites)
        thrower = Thrower(round_, sites, redis, redis_clock, store)
        began = time.monotonic()
        sites[0].start()
        thrown, slowness, late = _run(round_, sites, thrower)
        took = time.monotonic() - began
        codes = [site.poll() for site in sites]
        if late:
            _describe(directory, sites)
        else:
            _await_agents(sites)
        return judge.judge(round_, directory, sites, thrown, codes, took, slowness, late, redis, store)


def _leave(directory: Path, store: Path | None, sites: list[Site]) -> None:
    """What a node that crashed three days ago left behind."""
    for staging in [
        *([store / "v2" / "staging"] if store else []),
        sites[0].local / "objects" / "ab" / ".kcoord" / "staging",
    ]:
        left = staging / f"{os.uname().nodename}-4194303-{'5' * 12}"
        left.mkdir(parents=True)
        (left / "kernel.bin").write_bytes(b"half a ker")
        for path in (left / "kernel.bin", left):
            os.utime(path, (time.time() - 3 * 86400,) * 2)


def busy() -> float:
    """How much slower than an idle machine this one may be just now."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def _run(round_: Round, sites: list[Site], thrower: Thrower) -> tuple[list[Thrown], float, bool]:
    """Throw what is due until every launcher has ended; nothing lasts after it. And how slow the machine may have been, and
    whether the bound was passed first."""
    due: list[Fault] = list(round_.faults)
    later = sites[1:]
    active: list[Thrown] = []
    thrown: list[Thrown] = []
    started, begun, slowness = time.monotonic(), 0.0, busy()
    late = False
    while any([site.poll() is None for site in sites]) or later:  # noqa: C419 - each is to be looked at
        now = time.monotonic()
        if later and now - started >= round_.lag:
            later.pop(0).start()
        slowness = max(slowness, busy())
        if now - started > round_.bound * slowness:
            late = True
            break
        if not begun and any(site.begun for site in sites):
            begun = now
        while begun and due and due[0].at <= now - begun:
            active.append(thrower.begin(due.pop(0)))
            thrown.append(active[-1])
        for one in list(active):
            if one.fault.kind.startswith("artifact") and not one.met and now - one.began < _NOT_THERE:
                again = thrower.begin(one.fault)
                one.met, one.note = again.met, again.note
                if one.met:
                    one.began = again.began
            elif now - one.began >= one.fault.seconds:
                thrower.end(one)
                active.remove(one)
        time.sleep(_LOOKS)
    for one in active:
        thrower.end(one)
    return thrown, slowness, late


def _await_agents(sites: list[Site]) -> None:
    """Agents that ranks started end once they are idle."""
    deadline = time.monotonic() + IDLE_TIMEOUT + _DRAINS
    while any(site.processes() for site in sites) and time.monotonic() < deadline:
        time.sleep(0.1)


def _describe(directory: Path, sites: list[Site]) -> None:
    """Every process's threads and tasks, and what the agents say of themselves, into the round's directory."""
    for site in sites:
        command = [sys.executable, "-c", "from kcoord.cli import main; main()", "status", "--json"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(command, env=site.environ, capture_output=True, timeout=15, check=False)
            (directory / f"status-{site.number}.json").write_bytes(done.stdout + done.stderr)
        ours = [
            pid for pid, command in site.processes() if "-m kcoord.agent" in command or "tests.chaos.node" in command
        ]
        for pid in ours:
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
    time.sleep(1.0)
