"""A rig with a real NFS server and client hosts, driven from outside, and a job's nodes on its hosts.

``$NFS_RIG run CMD`` runs a shell line on the server's host, ``$NFS_RIG on HOST CMD`` on the client host A, B or C; the directory
``$RIG_SHARE`` is ``/host`` there. See tests/nfs/README.md for what else a rig has to offer.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kcoord.keys.cache_key import CacheKey

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "/opt/venv/bin/python"
PROJECT = "/var/tmp/kcoord-nfs/project"
REDIS_PORT = 6390
SOON = 60.0  # seconds: the bound of what is to happen at once; a rig may be emulated
_WHEELS = ("click", "rich")


class Rig:
    """The verbs. `share` is the directory that the rig calls ``/host``."""

    def __init__(self, command: str, share: Path) -> None:
        self._command, self._share = shlex.split(command), share
        self._databases = 0  # Redis databases that were handed out

    def run(self, line: str, within: float = 120.0) -> str:
        """What a shell line on the server's host prints. It must succeed."""
        return self._checked([*self._command, "run", line], within)

    def on(self, host: str, line: str, within: float = 120.0) -> str:
        return self._checked([*self._command, "on", host, line], within)

    def start(self, host: str, line: str) -> subprocess.Popen[bytes]:
        """A process on a client host that is told by its input, and ends with it."""
        return subprocess.Popen(
            [*self._command, "on", host, line], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def install(self) -> None:
        """This tree, and what it needs, onto the guest's own disk."""
        folder = self._share / "kcoord-nfs"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with tarfile.open(folder / "project.tar", "w") as archive:  # one file: an emulated rig is slow with hundreds
            for part in ("kcoord", "tests/nfs", "tests/support", "benchmarks"):
                archive.add(ROOT / part, part, filter=_source)
        try:
            self.run(f"{PYTHON} -c 'import {', '.join(_WHEELS)}, redis, filelock, msgpack, psutil, zstandard'")
        except AssertionError:
            self._bring_wheels(folder)
        self.run(f"rm -rf {PROJECT} && mkdir -p {PROJECT} && tar -C {PROJECT} -xf /host/kcoord-nfs/project.tar")
        shutil.rmtree(folder)

    def _bring_wheels(self, folder: Path) -> None:
        version = self.run(f"""{PYTHON} -c 'import sys; print("%d.%d" % sys.version_info[:2])'""").strip()
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--python-version", version,
             "--dest", str(folder / "wheels"), *_WHEELS],
            check=True,
        )  # fmt: skip
        self.run(f"{PYTHON} -m pip install --quiet --no-index --find-links /host/kcoord-nfs/wheels {' '.join(_WHEELS)}")

    @contextlib.contextmanager
    def redis(self) -> Iterator[str]:
        """A redis-server on host C, which no fault of the NFS server touches; its URL."""
        address = self.on("C", "hostname -I").split()[0]
        pid = "/var/tmp/kcoord-nfs/redis.pid"
        self.on(
            "C",
            f"redis-server --port {REDIS_PORT} --bind {address} --protected-mode no --save '' --daemonize yes"
            f" --dir /var/tmp/kcoord-nfs --pidfile {pid}",
        )
        try:
            yield f"redis://{address}:{REDIS_PORT}/0"
        finally:
            self.on("C", f"kill $(cat {pid})")

    def fresh_database(self, url: str) -> str:
        """An empty database of the redis-server at `url`: who uses another one does not hear of its leases."""
        self._databases = self._databases % 15 + 1
        fresh = f"{url.rpartition('/')[0]}/{self._databases}"
        self.on("C", f"redis-cli -u {fresh} flushdb")
        return fresh

    @contextlib.contextmanager
    def server_stopped(self) -> Iterator[None]:
        self.run("srv stop")
        try:
            yield
        finally:
            self.run("srv start")

    @contextlib.contextmanager
    def unplugged(self, host: str) -> Iterator[None]:
        self.run(f"srv unplug {host}")
        try:
            yield
        finally:
            self.run(f"srv plug {host}")

    @contextlib.contextmanager
    def replies_lost_until_a_restart(self, at_once: str = "true") -> Iterator[None]:
        """What is asked is done, and nobody is told; then the server is restarted and has forgotten that it did it.

        `at_once` is run on the server's host as it begins: a client that has waited for a moment for anything sends nothing new.
        """
        self.run(f"srv mute; {at_once}")
        try:
            yield
        finally:
            self.run("srv forget; srv stop; srv start; srv unmute")

    def _checked(self, command: list[str], within: float) -> str:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within)
        assert done.returncode == 0, f"{command[1:]} ended with {done.returncode}: {done.stderr}"
        return done.stdout


def _source(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = Path(member.name)
    return None if name.name in ("__pycache__", "results") or name.suffix == ".so" else member


class Call:
    """Something that a rank was told to do."""

    def __init__(self, what: str) -> None:
        self._what, self._reply = what, queue.Queue[dict[str, Any]](1)
        self._known: dict[str, Any] | None = None

    def settle(self, reply: dict[str, Any]) -> None:
        self._reply.put(reply)

    def reply(self, within: float = SOON) -> dict[str, Any]:
        if self._known is None:
            try:
                self._known = self._reply.get(timeout=within)
            except queue.Empty:
                raise AssertionError(f"{self._what} was not answered within {within:g} s") from None
        assert "error" not in self._known, f"{self._what}: {self._known['error']}"
        return self._known

    def value(self, within: float = SOON) -> Any:
        return self.reply(within)["value"]

    @property
    def done(self) -> bool:
        return self._known is not None or not self._reply.empty()

    def ended(self, within: float = SOON) -> float:
        """The moment on the guest's monotonic clock."""
        return float(self.reply(within)["ended"])

    def began(self, within: float = SOON) -> float:
        return float(self.reply(within)["began"])

    def seconds(self, within: float = SOON) -> float:
        return self.ended(within) - self.began(within)


class Rank:
    """A rank's process on a client host. `begin` returns at once, `do` with the answer."""

    def __init__(self, rig: Rig, host: str, environ: dict[str, str], before: str = "") -> None:
        self.host = host
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in environ.items())
        self._process = rig.start(host, f"{before} env {settings} {PYTHON} -u {PROJECT}/tests/nfs/guest/rank.py")
        self._calls: dict[int, Call] = {}
        self._errors = b""
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for reader in self._readers:
            reader.start()

    def begin(self, what: str, **arguments: Any) -> Call:
        number = len(self._calls)
        call = self._calls[number] = Call(f"{self.host}: {what} {arguments}")
        assert self._process.stdin is not None
        line = json.dumps({"id": number, "call": what, "with": arguments}).encode()
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
        return call

    def do(self, what: str, within: float = SOON, **arguments: Any) -> Any:
        return self.begin(what, **arguments).value(within)

    def end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            code = self._process.wait(SOON)
        finally:
            self._process.kill()
            self._process.wait()
            for reader in self._readers:
                reader.join(SOON)
            for pipe in (self._process.stdout, self._process.stderr):
                assert pipe is not None
                pipe.close()
        assert code == 0, f"the rank on {self.host} ended with {code}: {self._errors.decode()}"

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reply = json.loads(line)
            self._calls[reply["id"]].settle(reply)
        for call in list(self._calls.values()):
            if not call.done:
                call.settle({"error": f"the rank ended: {self._errors.decode()}"})

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors += line


class Job:
    """One store on one mount, and nodes on the client hosts that use it: an agent each, which their first rank starts.

    Leaving it ends the agents, and asserts that nothing is left behind: no process, no staging directory.
    """

    def __init__(self, rig: Rig, version: str, redis: str | None, **settings: str) -> None:
        self.rig, self.version = rig, version
        self._name = f"kc-{uuid.uuid4().hex[:8]}"
        # without hedges: a waiter that is let go ahead would hide one that is stuck
        self._settings = {"agent_timeout": "10", "max_wait": "120", "hedge": "0", **settings}
        if redis:
            self._settings["redis_url"] = rig.fresh_database(redis)
        self._settings["store"] = f"/mnt/{version}/{self._name}"
        self._ranks: list[Rank] = []
        self._nodes: dict[tuple[str, str], Rank] = {}  # (host, node) → its first rank
        rig.run(f"mkdir -m 1777 {self.on_server}")
        for host in "ABC":
            self.until_served(host)

    def until_served(self, host: str) -> None:
        """After a restart a v4 server makes its clients wait for up to 90 s."""
        self.rig.on(host, f"touch {self.store}/{host} && rm {self.store}/{host}", within=200)

    def elsewhere(self) -> str:
        """A Redis in which nothing is heard of this job."""
        return self.rig.fresh_database(self._settings["redis_url"])

    @property
    def mount(self) -> str:
        return f"/mnt/{self.version}"

    @property
    def store(self) -> str:
        """As the clients see it."""
        return self._settings["store"]

    @property
    def on_server(self) -> str:
        return f"/srv/nfs/{self._name}"

    def local(self, host: str, node: str = "") -> str:
        return f"/var/tmp/{self._name}-{host}{node}"

    def home(self, name: str) -> str:
        """Where the store has an artifact, below its root."""
        digest = digest_of(name)
        return f"v2/objects/{digest[:2]}/{digest}"

    def rank(
        self, host: str, node: str = "", *, before: str = "", variables: dict[str, str] | None = None, **settings: str
    ) -> Rank:
        """A rank on a host, with its agent running. Ranks with the same `node` share an agent and a local tier."""
        local = self.local(host, node)
        given = {**self._settings, **settings, "local_dir": local}
        environ = {"KCOORD_STORE_CREATE": "1"} | {f"KCOORD_{name.upper()}": value for name, value in given.items()}
        environ |= {
            "PYTHONPATH": f"{PROJECT}/tests/nfs/guest/gate:{PROJECT}",
            "NFS_GATE": f"{local}/gate",
            **(variables or {}),
        }
        rank = Rank(self.rig, host, environ, before)
        self._ranks.append(rank)
        self._nodes.setdefault((host, node), rank)
        assert "agent" in rank.do("status"), "no agent"
        return rank

    def notices(self, rank: Rank) -> list[str]:
        """What the agent of this rank's node has told."""
        return list(rank.do("status")["notices"])

    def until_store_is_used(self, rank: Rank, within: float = 3 * SOON) -> None:
        """Until the agent of `rank` has told that the store is back."""
        end = time.monotonic() + within
        while not any("is back" in line for line in self.notices(rank)):
            assert time.monotonic() < end, self.notices(rank)
            time.sleep(0.5)

    def staging_left(self) -> list[str]:
        return self.rig.run(f"ls -A {self.on_server}/v2/staging").split()

    def until_waiting(self, rank: Rank, names: list[str], within: float = SOON) -> None:
        """Until the agent of `rank` has a claim for each that waits for another node."""
        wanted, end = {digest_of(name) for name in names}, time.monotonic() + within
        while True:
            flights = rank.do("status")["flights"]
            if wanted <= {f["key"] for f in flights if f["state"] == "waiting for another node"}:
                return
            assert time.monotonic() < end, f"not all of {names} wait: {flights}"
            time.sleep(0.02)

    def until_tried(self, host: str, name: str, within: float = SOON) -> None:
        """Until the agent on `host` has published `name` in the store, or found that another was faster."""
        end = time.monotonic() + within
        tried = f"{self.local(host)}/gate/tried-{digest_of(name)}"
        while self.rig.run(f"test -e {tried} && ls -A {self.on_server}/v2/staging | wc -l || true").strip() != "0":
            assert time.monotonic() < end, f"{host} has not published {name} after {within:g} s"

    def until_published(self, names: list[str], within: float = SOON) -> None:
        """Until the server has them."""
        end = time.monotonic() + within
        test = " && ".join(f"test -e {self.on_server}/{self.home(name)}" for name in names)
        while self.rig.run(f"{test} && echo yes || true").strip() != "yes":
            assert time.monotonic() < end, f"{names} are not in the store after {within:g} s"

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        logs = ""
        try:
            if kind is None:
                for rank in self._nodes.values():
                    rank.do("stop_agent")
            for rank in self._ranks:
                try:
                    rank.end()
                except AssertionError:
                    if kind is None:
                        raise
            for host in {host for host, _ in self._nodes}:
                self.rig.on(host, (_AGENTS_ENDED if kind is None else _KILL_AGENTS).replace("NAME", self._name))
            left = self.staging_left()
        finally:
            if kind is not None:
                for host, node in self._nodes:
                    logs += self.rig.on(host, f"tail -n 40 {self.local(host, node)}/*.log || true")
                print(f"--- the agents' logs\n{logs}", file=sys.stderr)
            self.rig.run(f"rm -rf {self.on_server} /var/tmp/{self._name}-*")
        if kind is None:
            assert not left, f"left in the store's staging directory: {left}"


_KILL_AGENTS = """
pids=$(grep -lz 'KCOORD_LOCAL_DIR=/var/tmp/NAME-' /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3)
[ -z "$pids" ] || kill -9 $pids || true
"""
_AGENTS_ENDED = """
for i in $(seq 120); do pids=$(grep -lz 'KCOORD_LOCAL_DIR=/var/tmp/NAME-' /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3)
[ -z "$pids" ] && exit 0; sleep 0.5; done; kill -9 $pids; echo "left behind: $pids" >&2; exit 1
"""


def key_of(name: str) -> CacheKey:
    return CacheKey.of("nfs", name)


def digest_of(name: str) -> str:
    return key_of(name).digest


def in_one_bucket(count: int, bucket: str = "ab") -> list[str]:
    """Names whose artifacts lie in the same directory of the store."""
    names: list[str] = []
    number = 0
    while len(names) < count:
        if digest_of(f"one-bucket-{number}").startswith(bucket):
            names.append(f"one-bucket-{number}")
        number += 1
    return names
