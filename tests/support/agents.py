"""A node for a test: a real agent process on a short, fresh directory, and ranks that are real processes.

Both sides are here: what the test calls (`Node`, `Rank`, `Wire`) and what a rank's snippet calls (`as_rank`, `claim`,
`publish`, `say`, `listen`). Leaving a `Node` ends what it started, and asserts that nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from kcoord.artifacts import local
from kcoord.keys.cache_key import CacheKey
from kcoord.packs.recipe import Recipe
from kcoord.packs.recipe_files import roots, save_part
from kcoord.protocol import endpoint, frames, messages
from kcoord.protocol.identity import Identity
from kcoord.rank import spawn
from kcoord.rank.client import AgentClient, Answer, Lead
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord.telemetry.spans import Span
from tests.support import processes
from tests.support.environment import clean_environ
from tests.support.forkserver import Forked
from tests.support.waiting import SOON as SOON
from tests.support.waiting import eventually as until

ROOT = Path(__file__).resolve().parents[2]
_PRELUDE = """\
import warnings
warnings.simplefilter("error")
from tests.support.agents import *
client, notices = as_rank()
"""
_AGENT = """
import os, sys
os.setsid()
from kcoord.agent.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


def lookup(client: AgentClient, key: CacheKey) -> bytes | None:
    """The choice that was made for `key`."""
    found = client.ask(messages.Lookup(key.digest), messages.Choice)
    return None if found is None else found.content


def offer(client: AgentClient, key: CacheKey, content: bytes) -> bytes | None:
    """Offer a choice for `key`; returns the one that holds."""
    found = client.ask(messages.Offer(key, content, 1.0, ""), messages.Choice)
    return None if found is None else found.content


def key_of(name: str) -> CacheKey:
    return CacheKey.of("test", name)


def recipe_of(name: str) -> Recipe:
    """The recipe of `key_of(name)`, whose compile took half a second."""
    return Recipe("test", "tests", "kernel", name, "", 0.5, 1)


def hits(count: int = 1) -> list[Any]:
    """A span of handles that were found in memory, as a rank delivers it."""
    return Span("memory", "ok", "test", "", "", 1e9, 0.0, count=count).to_wire()


def stage(home: Path, text: str = "a kernel") -> Path:
    """A compile: a staging directory with one file."""
    staging = local.new_staging(home)
    (staging / "kernel.txt").write_text(text)
    return staging


# What a rank's snippet calls.


def as_rank() -> tuple[AgentClient, Notices]:
    notices = Notices()
    return AgentClient(Settings.from_environ(), notices), notices


def home_of(name: str, tier: str = "homes") -> Path:
    return Path(os.environ["KCOORD_LOCAL_DIR"]) / tier / name


def say(word: str, **facts: Any) -> None:
    os.write(1, json.dumps([word, facts]).encode() + b"\n")  # in one piece, also from a forked child


def listen() -> str:
    """The next line that the test sends; empty once the test has nothing more to say."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line.decode().strip()


def claim(client: AgentClient, name: str, tier: str = "homes") -> Answer:
    answer = client.claim(key_of(name), home_of(name, tier), recipe=recipe_of(name).digest)
    facts = {k: v for k, v in vars(getattr(answer, "granted", answer)).items() if isinstance(v, str)}
    say(type(answer).__name__, **facts)
    return answer


def publish(client: AgentClient, lead: Answer | None, name: str, tier: str = "homes", text: str = "a kernel") -> bool:
    home = home_of(name, tier)
    assert lead is None or isinstance(lead, Lead)
    return client.publish(lead, key_of(name), stage(home, text), home, 0.5, "no device")


# What a test calls.


class Rank:
    """A process that runs a snippet with `client` and `notices` in it, and says things."""

    def __init__(self, code: str, environ: dict[str, str]) -> None:
        pipes = [os.pipe() for _ in range(3)]
        (their_input, tells), (says, their_output), (fails, their_errors) = pipes
        theirs = (their_input, their_output, their_errors)
        self.process = processes.start(["-c", _PRELUDE + textwrap.dedent(code)], environ, ROOT, theirs)
        for each in theirs:
            os.close(each)
        self._input, self._output, self._error = os.fdopen(tells, "wb"), os.fdopen(says, "rb"), os.fdopen(fails, "rb")
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._errors = b""
        self._readers = [threading.Thread(target=self._read), threading.Thread(target=self._read_errors)]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def expect(self, word: str, within: float = SOON) -> dict[str, Any]:
        """The facts of the next thing that the rank says, which must be `word`."""
        try:
            line = self._lines.get(timeout=within)
        except queue.Empty:
            raise AssertionError(f"the rank did not say {word!r} within {within} s: {self._errors.decode()}") from None
        assert line, f"the rank ended before it said {word!r}: {self._errors.decode()}"
        said, facts = json.loads(line)
        assert said == word, (said, facts)
        return dict(facts)

    def tell(self, line: str = "go") -> None:
        self._input.write(line.encode() + b"\n")
        self._input.flush()

    def kill(self) -> float:
        """SIGKILL; the moment of it."""
        self.process.kill()
        return time.monotonic()

    def end(self) -> int:
        """Let the rank finish, and return its exit code."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            return self.process.wait(SOON)
        finally:
            self.process.kill()
            self.process.wait()
            for reader in self._readers:
                reader.join(SOON)
                assert not reader.is_alive(), "a descendant of the rank still holds its pipes"
            self._output.close()
            self._error.close()

    @property
    def errors(self) -> str:
        return self._errors.decode()

    def _read(self) -> None:
        for line in self._output:
            self._lines.put(line)
        self._lines.put(b"")

    def _read_errors(self) -> None:
        for line in self._error:
            self._errors += line


class Wire:
    """A bare connection to an agent, for saying what no client would say."""

    def __init__(self, path: Path, timeout: float = SOON) -> None:
        self.socket = endpoint.connect(path, timeout)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def hello(self, job: str = "wire") -> dict[str, Any]:
        self.send(Identity(os.getpid(), None, None, job).hello())
        return self.frame()

    def send(self, message: dict[str, Any]) -> None:
        self.raw(frames.encode_frame(message))

    def raw(self, content: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # a refused peer may be cut off while it is still speaking
            self.socket.sendall(content)

    def frame(self) -> dict[str, Any]:
        """The next frame that is no heartbeat. Raises EOFError once the agent has closed."""
        while True:
            length = frames.frame_length(self._bytes(frames.HEADER_BYTES))
            message = frames.decode_body(self._bytes(length))
            if message.get("op") != "waiting":
                return message

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.send({"id": 7, **message})
        return self.frame()

    def assert_closed(self) -> None:
        """Whatever else the agent says, it is the end."""
        with contextlib.suppress(EOFError):
            while True:
                assert self.frame()["op"] in ("refused", "welcome")

    def _bytes(self, length: int) -> bytes:
        content = b""
        while len(content) < length:
            try:
                chunk = self.socket.recv(length - len(content))
            except ConnectionError:
                chunk = b""
            if not chunk:
                raise EOFError
            content += chunk
        return content


class Node:
    """A directory, settings (`flags`, as text), and the agents, clients and ranks that use them."""

    def __init__(self, **flags: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kc-", dir="/tmp"))  # a socket's path is short
        self.flags = {
            "local_dir": str(self.directory),
            "idle_timeout": "60",
            "max_wait": "40",
            "store_create": "1",
            **flags,
        }
        self.settings = self.with_flags()
        self._clients: list[AgentClient] = []
        self._ranks: list[Rank] = []
        self._agents: list[subprocess.Popen[bytes] | Forked] = []
        self._log = (self.directory / "started.log").open("wb")

    def with_flags(self, **flags: str) -> Settings:
        return Settings.from_environ({}, **{**self.flags, **flags})

    def environ(self, **more: str) -> dict[str, str]:
        return {**clean_environ(), **{f"KCOORD_{n.upper()}": v for n, v in self.flags.items()}, **more}

    def start(
        self,
        *arguments: str,
        prelude: str = "",
        environ: Mapping[str, str] | None = None,
        wrap: Sequence[str] = (),
    ) -> subprocess.Popen[bytes] | Forked:
        """An agent as a supervisor starts it; it ends with us if we are killed. `prelude` runs first, with `environ` besides.

        `wrap`: a command that runs it in a namespace of its own.
        """
        arguments = arguments or ("--parent", str(os.getpid()))
        variables = {**spawn.agent_environment(self.settings), **(environ or {})}
        self.settings.local_dir.mkdir(mode=0o700, exist_ok=True)
        with endpoint.bind(self.path) as listener, Path(os.devnull).open("rb") as nothing:
            fd, log = listener.fileno(), self._log.fileno()
            command = ["-c", prelude + _AGENT, "kcoord.agent", "--fd", str(fd), *arguments]
            agent = processes.start(command, variables, "/", (nothing.fileno(), log, log), (fd,), wrap)
        self._agents.append(agent)
        return agent

    def knows(self, *names: str) -> None:
        """The agents that are started from now on know, by the profile ``known``, that these compiles take half a second."""
        self.settings = self.with_flags(profile="known")
        save_part(roots(None, self.directory)[0] / "known", [recipe_of(name) for name in names])

    def client(self, **flags: str) -> AgentClient:
        client = AgentClient(self.with_flags(**flags), Notices())
        self._clients.append(client)
        return client

    def rank(self, code: str, **more: str) -> Rank:
        rank = Rank(code, self.environ(**more))
        self._ranks.append(rank)
        return rank

    @property
    def path(self) -> Path:
        return self.settings.socket_path

    def wire(self) -> Wire:
        return Wire(self.path)

    def home(self, name: str, tier: str = "homes") -> Path:
        return self.settings.local_dir / tier / name

    def claim(self, client: AgentClient, name: str, tier: str = "homes") -> Answer:
        return client.claim(key_of(name), self.home(name, tier))

    def lead(self, client: AgentClient, name: str, tier: str = "homes") -> Lead:
        """The answer to a claim that nobody else leads."""
        answer = self.claim(client, name, tier)
        assert isinstance(answer, Lead)
        return answer

    def claiming(self, client: AgentClient, name: str, tier: str = "homes") -> Future[Answer]:
        """`claim` in a thread of its own."""
        return in_thread(lambda: self.claim(client, name, tier))

    def publish(self, client: AgentClient, lead: Answer | None, name: str, tier: str = "homes") -> bool:
        assert lead is None or isinstance(lead, Lead)
        home = self.home(name, tier)
        return client.publish(lead, key_of(name), stage(home), home, 0.5, "no device")

    def read(self, name: str, tier: str = "homes") -> str:
        """The artifact's content, verified."""
        artifact = local.open_artifact(self.home(name, tier), key_of(name).digest)
        assert artifact is not None
        return (artifact.path / "kernel.txt").read_text()

    def status(self) -> dict[str, Any]:
        with self.wire() as wire:
            wire.hello()
            return wire.ask({"op": "status"})

    def flight(self, name: str) -> dict[str, Any]:
        """What the agent says about the flight of a key; empty if there is none."""
        digest = key_of(name).digest
        return next((f for f in self.status()["flights"] if f["key"] == digest), {})

    def until_waiting(self, name: str, count: int) -> None:
        until(lambda: len(self.flight(name).get("waiting", ())) == count)

    def agent_pids(self) -> list[int]:
        """The agents of this node that live, whoever started them."""
        from tests.support import living

        return [agent.pid for agent in living.agents_of(living.those_within(self.directory))]

    def __enter__(self) -> Node:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        from tests.support import living

        for client in self._clients:
            client.close()
        if kind is not None:
            for log in self.directory.glob("*.log"):
                print(f"--- {log.name}\n{log.read_text()}", file=sys.stderr)
            for rank in self._ranks:
                rank.kill()
        try:
            codes = [(rank.end(), rank.errors) for rank in self._ranks]
            for pid in self.agent_pids():
                end_agent(pid)
            for agent in self._agents:
                agent.wait(SOON)
            left = [(process.pid, living.words_of(process)) for process in living.those_within(self.directory)]
        finally:
            living.kill(living.those_within(self.directory))
            self._log.close()
            shutil.rmtree(self.directory)
        if kind is None:
            assert not left, "a process was left behind"
            assert not [c for c in codes if c[0] not in (0, -signal.SIGKILL, 7)], codes


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextlib.contextmanager
def watching(pid: int) -> Iterator[Callable[[float], bool]]:
    """Yields ``ended(within)``: whether the process ends within so many seconds. It must live now."""
    fd = os.pidfd_open(pid)
    try:
        yield lambda within: bool(select.select([fd], [], [], within)[0])
    finally:
        os.close(fd)


def end_agent(pid: int, number: int = signal.SIGTERM) -> None:
    """End an agent that this test's node started, and wait for it."""
    with contextlib.suppress(ProcessLookupError), watching(pid) as ended:
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        assert ended(SOON), "the agent does not end"
