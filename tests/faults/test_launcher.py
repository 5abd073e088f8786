"""The launcher is interrupted, killed or pre-empted while ranks compile: nothing is left, and the next start is warm."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis

from kcoord.artifacts.store import Store
from tests.support.command import KCOORD, as_json
from tests.support.interpose import Interposer
from tests.support.living import those_within
from tests.support.redis_server import RedisServer
from tests.support.sandbox import PROGRAMS, Sandbox, Started, eventually, finish

TTL = 2.0  # seconds
GRACE = 2.0  # seconds between SIGTERM and SIGKILL, as schedulers have it
RANK = PROGRAMS / "generic_rank.py"
EXEC = (*KCOORD, "exec", "--", sys.executable, str(PROGRAMS / "fleet.py"), "2", str(RANK))
TORCHRUN = ("-m", "kcoord_launch.torchrun", "--nproc-per-node=2", "--standalone", str(RANK))
LAUNCHERS = {"exec": EXEC, "torchrun": TORCHRUN}

needs_torch = pytest.mark.skipif(
    not any((Path(p) / "torch").is_dir() for p in sys.path), reason="no torch: pip install 'kcoord[torch]'"
)
both = pytest.mark.parametrize("launcher", ["exec", pytest.param("torchrun", marks=needs_torch)])


class Cluster:
    """What jobs of this test share: one Redis, one store."""

    def __init__(self, sandbox: Sandbox, server: RedisServer) -> None:
        self.sandbox, self.store = sandbox, sandbox.root / "store"
        self.begun = sandbox.root / "begun"
        self._redis, self._url = redis.Redis.from_url(server.url), server.url
        self.jobs: list[subprocess.Popen[str]] = []

    def start(self, *command: str | Path, node: int = 0, **more: str) -> subprocess.Popen[str]:
        """A job's part on one node; `begun` is there once a rank of the node compiles."""
        job = self.sandbox.start(*command, **{**self.environment(node), **more})
        self.jobs.append(job)
        return job

    def fork(self, *command: str | Path, node: int = 0) -> Started:
        """As `start`, but the launcher is forked, and so are torchrun's ranks."""
        fork = self.sandbox.fork_torchrun if "kcoord_launch.torchrun" in command else self.sandbox.fork_kcoord
        return fork(*command, **self.environment(node))

    def environment(self, node: int) -> dict[str, str | None]:
        return {
            "KCOORD_LOCAL_DIR": str(self.local(node)),
            "KCOORD_STORE": str(self.store),
            "KCOORD_REDIS_URL": self._url,
            "KCOORD_LEASE_TTL": str(TTL),
            "BEGUN": str(self.begun_on(node)),
        }

    def local(self, node: int) -> Path:
        return self.sandbox.root / f"node{node}"

    def begun_on(self, node: int) -> Path:
        return self.begun.with_suffix(f".{node}")

    def until_compiling(self, job: Started, node: int = 0) -> None:
        eventually(lambda: self.begun_on(node).exists() or job.poll() is not None, 60)
        assert job.poll() is None, job.communicate()

    def processes(self, node: int) -> list[psutil.Process]:
        return those_within(self.local(node))

    def published(self) -> int:
        made = (self.store / "v2" / "objects").is_dir()  # by the first agent
        return len(Store(self.store).manifests()) if made else 0

    def leases(self) -> int:
        names = self._redis.scan_iter(match="kcoord:*:lease:*")
        return sum((self._redis.get(n) or b"")[:1] == b"L" for n in names)

    def nothing_is_left(self) -> None:
        """No process, no socket; and no lease for longer than its TTL."""
        eventually(lambda: not self.sandbox.processes(), what="all processes ended")
        assert not list(self.sandbox.root.rglob("*.sock"))
        eventually(lambda: self.leases() == 0, TTL + 1, "the leases ended")

    def close(self) -> None:
        self._redis.close()
        for job in self.jobs:
            if job.poll() is None:
                job.kill()
            for pipe in (job.stdout, job.stderr):
                if pipe is not None:
                    pipe.close()
            job.wait()


@pytest.fixture
def cluster(sandbox: Sandbox) -> Iterator[Cluster]:
    with RedisServer() as server:
        cluster = Cluster(sandbox, server)
        try:
            yield cluster
        finally:
            cluster.close()


def reports(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def compiles(output: str) -> int:
    return sum(len(r["compiled"]) for r in reports(output))


# Interrupted.


@pytest.mark.parametrize(
    ("launcher", "number"),
    [("exec", signal.SIGTERM), ("exec", signal.SIGHUP), pytest.param("torchrun", signal.SIGHUP, marks=needs_torch)],
)
def test_a_signal_to_the_launcher_ends_ranks_that_compile_and_frees_what_they_lead(
    cluster: Cluster, launcher: str, number: signal.Signals
) -> None:
    # by exec: a launcher that is told to end while it asks for a forked rank would not know of it
    job = cluster.start(*LAUNCHERS[launcher], "4", "60", KCOORD_LEASE_TTL="60")
    cluster.until_compiling(job)
    assert cluster.leases() == 1
    job.send_signal(number)
    done = finish(job, 60)
    assert done.returncode != 0
    assert "restarted" not in done.stderr
    assert cluster.leases() == 0, "given back, with 60 s to go"
    cluster.nothing_is_left()


def has_waiters(cluster: Cluster) -> bool:
    status = as_json(cluster.sandbox, "status", KCOORD_LOCAL_DIR=str(cluster.local(0)))
    return any(flight["waiting"] for flight in status["flights"])


@both
def test_two_ctrl_c_in_a_terminal_leave_nothing(cluster: Cluster, launcher: str) -> None:
    """As a person does who is in a hurry. A terminal sends each to the whole foreground."""
    keyboard, terminal = pty.openpty()
    os.set_blocking(keyboard, False)
    foreground = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", foreground, sys.executable, *map(str, LAUNCHERS[launcher]), "4", "60"]
    environment = cluster.sandbox.env(
        KCOORD_LOCAL_DIR=str(cluster.local(0)), BEGUN=str(cluster.begun_on(0)), KCOORD_LEASE_TTL="60"
    )
    try:
        job = subprocess.Popen(
            command, env=environment, cwd=cluster.sandbox.root, start_new_session=True,
            stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        cluster.jobs.append(job)
        cluster.until_compiling(job)
        if launcher == "torchrun":  # it forgets ranks if it is interrupted while it starts them
            eventually(lambda: has_waiters(cluster), 60, "the other rank waits")
        assert os.tcgetpgrp(keyboard) == job.pid, "it has no terminal: the test shows nothing"
        os.write(keyboard, b"\x03")
        time.sleep(0.2)  # a person's pause: it is not waited for anything
        os.write(keyboard, b"\x03")
        assert finish(job, 60).returncode != 0
        cluster.nothing_is_left()
    finally:
        os.close(keyboard)
        os.close(terminal)


def test_a_signal_before_the_command_has_begun_is_not_lost(sandbox: Sandbox) -> None:
    """It comes in the moment in which the command is started: the command has it, and nothing is left running."""
    script = sandbox.root / "early.py"
    script.write_text(
        "import os, signal, subprocess, sys\n"
        "from kcoord.cli import main\n"
        "start = subprocess.Popen\n"
        "def popen(command, *a, **k):\n"
        "    if command[0] == 'sleep':\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return start(command, *a, **k)\n"
        "subprocess.Popen = popen\n"
        "main()\n"
    )
    done = sandbox.run(script, "exec", "--", "sleep", "100", timeout=60)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert not sandbox.processes()


def test_a_command_under_nohup_ignores_hangups(sandbox: Sandbox) -> None:
    asks = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    job = subprocess.Popen(
        ["nohup", sys.executable, *KCOORD, "exec", "--", sys.executable, "-c", asks],
        env=sandbox.env(), cwd=sandbox.root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    done = finish(job, 60)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_a_command_that_fails_has_failed_also_below_what_ignores_the_end_of_its_children(sandbox: Sandbox) -> None:
    """As some daemons do, and what they start inherits it: then the kernel tells nobody how a process ended."""
    ignores = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    done = sandbox.run("-c", ignores, sys.executable, *KCOORD, "exec", "--", "sh", "-c", "exit 3")
    assert done.returncode == 3, done.stderr


# Killed.


def test_ranks_whose_launcher_is_killed_go_on_alone_and_its_agent_ends(cluster: Cluster) -> None:
    """Nobody ends its ranks then; `tests/node/test_torchrun.py` has the same of torchrun, which may end them."""
    job = cluster.start(*EXEC, "4", "0.3")
    cluster.until_compiling(job)
    job.kill()
    done = finish(job, 60)  # its ranks hold its pipes for as long as they live
    assert done.returncode == -signal.SIGKILL
    assert [len(r["served"]) for r in reports(done.stdout)] == [4, 4]
    cluster.nothing_is_left()


# Pre-empted.


@pytest.mark.parametrize("grace", [GRACE, 0.0], ids=["with a grace", "at once"])
def test_a_job_that_is_pre_empted_and_resumed_compiles_nothing_twice_that_was_published(
    cluster: Cluster, grace: float
) -> None:
    """Two nodes; SIGTERM to every process there is, SIGKILL to those that are left after a grace."""
    keys = 10
    jobs = [cluster.fork(*EXEC, str(keys), "0.15", node=node) for node in range(2)]
    eventually(lambda: cluster.published() >= 3 or any(j.poll() is not None for j in jobs), 60)
    if grace:
        for process in cluster.sandbox.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        end = time.monotonic() + grace
        while cluster.sandbox.processes() and time.monotonic() < end:
            time.sleep(0.05)
    while left := cluster.sandbox.processes():
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    for job in jobs:
        assert finish(job, 20).returncode != 0, "it was over before it was pre-empted: the test shows nothing"
    published = cluster.published()
    assert 3 <= published < keys
    eventually(lambda: cluster.leases() == 0, TTL + 1, "the leases ended")
    if grace:
        cluster.nothing_is_left()
    resumed = [finish(cluster.fork(*EXEC, str(keys), "0.05", node=node)) for node in range(2)]
    assert [r.returncode for r in resumed] == [0, 0], [r.stderr for r in resumed]
    assert [len(r["served"]) for r in reports("".join(r.stdout for r in resumed))] == [keys] * 4
    assert compiles("".join(r.stdout for r in resumed)) == keys - published
    warm = finish(cluster.fork(*EXEC, str(keys), "0.05"))
    assert compiles(warm.stdout) == 0
    cluster.nothing_is_left()


HUNG = {"KCOORD_SIGNING_KEY_FILE": "signing-key", "KCOORD_REDIS_URL_FILE": "redis-url"}
RANK_WITHOUT_A_LAUNCHER = """
import kcoord
from kcoord.rank import spawn
kcoord.install()
coordinator = kcoord.connect()
coordinator.get_or_compile(kcoord.CacheKey.of("test", "k"), lambda staging: (staging / "a").touch())
assert "KCOORD_SIGNING_KEY_FILE" in spawn.agent_environment(coordinator.settings)
"""


def test_a_rank_never_looks_where_the_files_of_the_agents_secrets_are(sandbox: Sandbox, interposer: Interposer) -> None:
    """It may be a home directory on an NFS server that hangs, and nobody could bound the look."""
    hung = sandbox.root / "hung"
    looks = [interposer.fail(call, below=hung, error=errno.EIO) for call in ("stat", "open")]
    given = {name: str(hung / file) for name, file in HUNG.items()}
    done = sandbox.run("-c", RANK_WITHOUT_A_LAUNCHER, KCOORD_SPAWN="0", **given, **interposer.environ)
    assert done.returncode == 0, done.stderr
    assert [look.hits for look in looks] == [0, 0]
    looker = "from kcoord.settings import Settings; Settings.from_environ().as_mounted()"
    assert sandbox.run("-c", looker, **given, **interposer.environ).returncode == 0
    assert any(look.hits for look in looks), "nothing would be seen: the test shows nothing"


def test_a_job_starts_although_the_files_of_its_secrets_hang(sandbox: Sandbox, interposer: Interposer) -> None:
    hung = sandbox.root / "hung"
    for call in ("stat", "open"):
        interposer.stall(call, below=hung, seconds=600)
    impatient = "import kcoord_launch.checks as c; c._PATIENCE = 0.5; from kcoord.cli import main; main()"
    given = {name: str(hung / file) for name, file in HUNG.items()}
    done = sandbox.run("-c", impatient, "exec", "--", "echo", "it ran", KCOORD_AGENT_TIMEOUT="0.5", **given,
                       **interposer.environ)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "it ran" in done.stdout
    assert "KCOORD_REDIS_URL_FILE and KCOORD_SIGNING_KEY_FILE: no answer" in done.stderr


@pytest.mark.parametrize("broken", ["KCOORD_STORE", "KCOORD_LOCAL_DIR"])
def test_a_disk_that_fails_when_a_job_starts_does_not_keep_it_from_starting(
    sandbox: Sandbox, interposer: Interposer, broken: str
) -> None:
    directories = {"KCOORD_STORE": str(sandbox.root / "store"), "KCOORD_LOCAL_DIR": str(sandbox.local)}
    for call in ("mkdir", "open"):
        interposer.fail(call, below=Path(directories[broken]), error=errno.ESTALE)
    done = sandbox.run(*KCOORD, "exec", "--", "echo", "it ran", **directories, **interposer.environ)
    assert done.returncode == 0, done.stderr
    assert "it ran" in done.stdout
    assert directories[broken] in done.stderr
