"""One node of a round: its launcher, its agent, its ranks, and the faults in its system calls and clock."""

from __future__ import annotations

import contextlib
import os
import shutil
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
_TEMPORARY = "4m"


class Site:
    """Node `number` of the round in `directory`, with a file system for its temporary directory where this user may mount one.

    `url`, `store`: None in a round without them. `named`: see `Round`.
    """

    def __init__(
        self,
        directory: Path,
        number: int,
        launcher: str,
        url: str | None,
        store: Path | None,
        library: Path | None,
        named: bool,
    ) -> None:
        self.number, self.directory = number, directory
        self.temporary = directory / f"tmp{number}"
        cache = directory / f"n{number}"
        self.local = cache if named else cache / "kcoord"
        self.log = directory / f"node-{number}.log"
        own = directory / f"i{number}"
        for made in (self.local, own, self.temporary):
            made.mkdir(mode=0o700, parents=True)
        self.mounted = _mount("-t", "tmpfs", "-o", f"size={_TEMPORARY},mode=700", "kcoord-chaos", str(self.temporary))
        self.interposer = Interposer(library, own) if library is not None else None
        clean = {n: v for n, v in os.environ.items() if not n.startswith(("KCOORD_", "INTERPOSE", "LD_PRELOAD"))}
        self.environ = {
            **clean,
            **(self.interposer.environ if self.interposer is not None else {}),
            **{name: f"{value:g}" for name, value in SETTINGS.items()},
            **({"KCOORD_LOCAL_DIR": str(self.local)} if named else {"XDG_CACHE_HOME": str(cache)}),
            "KCOORD_JOB": "chaos",
            "KCOORD_PROFILE": "chaos",
            **({"KCOORD_REDIS_URL": url} if url else {}),
            **({"KCOORD_STORE": str(store), "KCOORD_STORE_CREATE": "1"} if store else {}),
            "CHAOS_STACKS": str(directory / "stacks"),
            "PYTHONPATH": os.pathsep.join(map(str, (_INSIDE, ROOT, ROOT / "launch"))),
            "PYTHONWARNINGS": "default",  # a coroutine that nobody awaited is said on stderr
            "TMPDIR": str(self.temporary),
        }
        socket = Settings.from_environ({**self.environ, "KCOORD_LOCAL_DIR": str(self.local)}).socket_path
        runtime = f"kcoord-{os.getuid()}"
        self.socket = socket if named else self.temporary / runtime / socket.name
        # a full temporary directory is none to Python, which takes the next one
        self._sockets = [self.socket, *(Path(each, runtime, socket.name) for each in ("/tmp", "/var/tmp"))]
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

    def remount(self, option: str) -> bool:
        """Mount the temporary directory again with `option`. False: it is no file system of its own."""
        return self.mounted and _mount("-o", f"remount,{option}", str(self.temporary))

    def sockets(self) -> list[Path]:
        return [path for path in self._sockets if path.is_socket()]

    def logs(self) -> list[Path]:
        return [path for socket in self._sockets if (path := socket.with_suffix(".log")).is_file()]

    def processes(self) -> list[tuple[int, str]]:
        """Pid and command line of every process of this node, whoever started it."""
        found = []
        mark = f"TMPDIR={self.temporary}\0".encode()
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
        for left in [*self.sockets(), *self.logs()]:
            left.unlink(missing_ok=True)
        if self.mounted:
            subprocess.run(["umount", "-l", self.temporary], check=True, timeout=30)


def _mount(*arguments: str) -> bool:
    command = shutil.which("mount")
    return (
        command is not None and subprocess.run([command, *arguments], capture_output=True, timeout=30).returncode == 0
    )
