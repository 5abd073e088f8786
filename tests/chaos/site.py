"""One node of a round: its launcher, its agent, its ranks, and the faults in its system calls and clock."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kcoord.settings import Settings
from tests.chaos.journal import Reader
from tests.chaos.kinds import SETTINGS
from tests.support.interpose import Interposer

ROOT = Path(__file__).resolve().parents[2]
_INSIDE = Path(__file__).with_name("inside")


class Site:
    """Node `number` of the round in `directory`. `url`, `store`: None in a round without them."""

    def __init__(
        self, directory: Path, number: int, launcher: str, url: str | None, store: Path | None, library: Path | None
    ) -> None:
        self.number, self.directory = number, directory
        self.local = directory / f"n{number}"
        self.log = directory / f"node-{number}.log"
        own = directory / f"i{number}"
        for made in (self.local, own, directory / f"tmp{number}"):
            made.mkdir(mode=0o700)
        self.interposer = Interposer(library, own) if library is not None else None
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("KCOORD_", "INTERPOSE", "LD_PRELOAD"))}
        self.environ = {
            **clean,
            **(self.interposer.environ if self.interposer is not None else {}),
            **{name: f"{value:g}" for name, value in SETTINGS.items()},
            "KCOORD_LOCAL_DIR": str(self.local),
            "KCOORD_JOB": "chaos",
            "KCOORD_PROFILE": "chaos",
            **({"KCOORD_REDIS_URL": url} if url else {}),
            **({"KCOORD_STORE": str(store), "KCOORD_STORE_CREATE": "1"} if store else {}),
            "CHAOS_STACKS": str(directory / "stacks"),
            "PYTHONPATH": os.pathsep.join(map(str, (_INSIDE, ROOT, ROOT / "launch"))),
            "PYTHONWARNINGS": "default",  # a coroutine that nobody awaited is said on stderr
            "TMPDIR": str(directory / f"tmp{number}"),
        }
        self.settings = Settings.from_environ(self.environ)
        self.ranks: dict[int, int] = {}  # rank → pid
        self.deaths: list[dict[str, Any]] = []
        self.begun = False
        self._launcher = launcher
        self._reader = Reader(directory / f"node-{number}.jsonl")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.chaos.node", str(self.directory), str(self.number)]
        if self._launcher == "exec":
            command = [sys.executable, "-c", "from kcoord.cli import main; main()", "exec", "--", *command]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self.environ, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )  # fmt: skip

    def poll(self) -> int | None:
        """Learn who started and ended; the launcher's exit code, None while it runs."""
        code = self._process.poll() if self._process is not None else None
        for said in self._reader.new():
            if said["event"] == "started":
                self.ranks[said["rank"]] = said["pid"]
                self.begun = True
            else:
                self.ranks.pop(said["rank"], None)
                self.deaths.append(said)
        return code

    def processes(self) -> list[tuple[int, str]]:
        """Pid and command line of every process of this node, whoever started it."""
        found = []
        mark = f"KCOORD_LOCAL_DIR={self.local}\0".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):  # it has ended, or is another user's
                    if mark in (entry / "environ").read_bytes() + b"\0":
                        found.append((int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
        return found

    def agents(self) -> list[int]:
        return [pid for pid, command in self.processes() if "-m kcoord.agent" in command]

    def end(self) -> None:
        """SIGKILL to all that is left of this node."""
        for pid, _ in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
