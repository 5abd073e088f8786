"""Two nodes of two ranks with a store and a Redis between them, and a way to break their disks while they run."""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.object import read_object
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid
from kcoord.files.reading import read_plain
from tests.support.agents import Node, Rank, key_of
from tests.support.forkserver import Forked
from tests.support.redis_server import RedisServer

NODES, RANKS = 2, 2
CANNOT = "the store cannot be used"
BACK = "is back: artifacts are published there again"

QUICK = """
import functools, kcoord.agent.tiers as tiers
tiers.StoreBreaker = functools.partial(tiers.StoreBreaker, probes=(0.2, 0.5))
"""
"""For an agent: it looks as often for the end of a fault as a test has time for."""

UNPRIVILEGED = """
import ctypes
for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: permissions hold for root, too
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
import os, sys
if not os.environ.get("AGAIN"):
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, sys.orig_argv)
"""

_RANK = """
import kcoord
from tests.support.cluster import content_of
coordinator = kcoord.connect()
say("here")
while name := listen():
    compiled = []
    def compile(staging):
        compiled.append(time.time())
        time.sleep(1.0 if name.startswith("slow") else 0.0)
        (staging / "kernel.bin").write_bytes(content_of(name, WRITER))
        (staging / "kernel.txt").write_bytes(content_of(name, WRITER)[:100])
    artifact = coordinator.get_or_compile(key_of(name), compile, scope=kcoord.Scope.TARGET)
    got = (artifact.path / "kernel.bin").read_bytes()
    assert (artifact.path / "kernel.txt").read_bytes() == got[:100]
    writer = next(w for w in range(8) if content_of(name, w) == got)
    say("has", compiled=len(compiled), begun=compiled[:1], path=str(artifact.path), writer=writer)
"""


def content_of(name: str, writer: int = 0) -> bytes:
    """16 KiB that do not compress, the same in every process; different writers write different ones."""
    return random.Random(f"{name} {writer}").randbytes(16 << 10)


def key_digest(name: str) -> str:
    """The digest under which a rank without a GPU asks for `name`."""
    from kcoord.keys.device import Scope, current_device

    return key_of(name).on(current_device(), Scope.TARGET).digest


class Cluster:
    """`strangers`: the nodes do not hear of each other's leases, in databases of their own."""

    def __init__(self, store: Path, redis: RedisServer, stack: contextlib.ExitStack, strangers: bool = False) -> None:
        self.store = Store(store)
        flags = {"store": str(store), "lease_ttl": "3", "agent_timeout": "10"}
        self.nodes = [
            stack.enter_context(Node(**flags, redis_url=redis.url.replace("db=0", f"db={number if strangers else 0}")))
            for number in range(NODES)
        ]
        self.ranks: list[Rank] = []

    def start(self, prelude: str = QUICK, environ: Mapping[str, str] | None = None) -> None:
        """`prelude`: what each agent runs first; `environ`: what it sees besides."""
        for node in self.nodes:
            start_agent(node, prelude, environ)

    def add_ranks(self, per_node: int = RANKS, writers: bool = False, **more: str) -> None:
        for number, node in enumerate(self.nodes):
            for _ in range(per_node):
                writer = number if writers else 0
                self.ranks.append(node.rank(_RANK.replace("WRITER", str(writer)), **more))
        for rank in self.ranks:
            rank.expect("here", 60)

    def ask(self, name: str, ranks: list[Rank] | None = None) -> list[dict[str, Any]]:
        """Every rank wants `name` at once; what each says. A rank that has wrong bytes ends, and so does the test."""
        asked = self.ranks if ranks is None else ranks
        for rank in asked:
            rank.tell(name)
        return [rank.expect("has", 60) for rank in asked]

    def compiles(self, name: str) -> int:
        return sum(told["compiled"] for told in self.ask(name))

    def logs(self) -> list[str]:
        return [(node.directory / "started.log").read_text() for node in self.nodes]

    def holds(self, name: str) -> bool:
        """Whether the store has the artifact, whole."""
        return is_whole(self.store.home(key_digest(name)))

    def left_in_staging(self) -> list[str]:
        return sorted(path.name for path in (self.store.root / "v2" / "staging").iterdir())


def start_agent(
    node: Node, prelude: str = QUICK, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes] | Forked:
    """As `Node.start`, with code of the test's before the agent's own."""
    return node.start(prelude=prelude, environ=environ)


def is_whole(home: Path) -> bool:
    try:
        content = read_plain(home, 1 << 30)
        found = read_object(io.BytesIO(content).read, len(content), Manifest.decode)
        found.contents()
    except (ArtifactInvalid, OSError):
        return False
    return found.manifest.key.digest == home.name


class Onlooker:
    """Reads the store all the time, as any node may; `torn` are the artifacts that it ever saw less than whole."""

    def __init__(self, store: Path) -> None:
        self.torn: set[str] = set()
        self.seen: set[str] = set()
        self._objects, self._end = store / "v2" / "objects", threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Onlooker:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.01):
            for home in self._objects.glob("??/*"):
                if str(home) not in self.seen and not is_whole(home) and home.exists():
                    self.torn.add(str(home))
                self.seen.add(str(home))


@contextlib.contextmanager
def cluster(store: Path, strangers: bool = False, damaged: bool = False) -> Iterator[Cluster]:
    """Agents and ranks are yet to be started. At the end nothing of them is left, and no artifact was ever torn.

    `damaged`: but by the test.
    """
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        made = Cluster(store, redis, stack, strangers)
        onlooker = stack.enter_context(Onlooker(store))
        yield made
    assert damaged or not onlooker.torn


def fill(directory: Path) -> Path:
    """Use up the disk, so that not even an empty file more can be written to."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 4096):
            pass
    return ballast


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
