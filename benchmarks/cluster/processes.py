"""The processes of a simulated cluster, which speak in lines of JSON, and the load of this machine meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_END = 20.0  # seconds for all nodes to end
_SATURATED = 90.0  # per cent of this machine's CPU
_ROOT = Path(__file__).resolve().parents[2]


class ClusterError(Exception):
    """A run that failed; the message has the reason."""


@dataclass(frozen=True)
class Member:
    """One process, of the module `program` here. `node`: the number of its first node; `part`: the first line to it; `wrap`:
    put before the command, to lead it to another host.
    """

    program: str
    node: int
    part: Any
    wrap: tuple[str, ...] = ()


class Processes:
    """The nodes' processes. All have ended when the block is left, and their agents too."""

    def __init__(self, members: list[Member], root: Path, environ: dict[str, str]) -> None:
        self._members, self._root, self._environ = members, root, environ
        self._processes: list[subprocess.Popen[str]] = []
        self._lines: list[queue.Queue[str]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Processes:
        try:
            for member in self._members:
                self._start(member)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, member: Member) -> None:
        with (self._root / f"n{member.node}.log").open("wb") as log:
            process = subprocess.Popen(
                [*member.wrap, sys.executable, "-m", f"benchmarks.cluster.{member.program}"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=_ROOT,
                env=os.environ | self._environ,
                start_new_session=True,  # the keyboard interrupts us, and we end them
            )  # fmt: skip
        lines: queue.Queue[str] = queue.Queue()
        self._processes.append(process)
        self._lines.append(lines)
        self._readers.append(threading.Thread(target=_read, args=(process, lines), daemon=True))
        self._readers[-1].start()
        _tell(process, json.dumps(member.part))

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()  # asks it to end
        deadline = time.monotonic() + _END
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                agents = psutil.Process(process.pid).children()
                process.kill()
                process.wait()
                for agent in agents:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        agent.kill()
        for reader in self._readers:
            reader.join(_END)

    def tell(self, line: str) -> None:
        for process in self._processes:
            _tell(process, line)

    def hear(self, deadline: float, what: str) -> list[dict[str, Any]]:
        """The next line of each node. Raises `ClusterError` if one has none until `deadline`, a moment of the monotonic clock."""
        found: dict[int, dict[str, Any]] = {}
        for n, lines in enumerate(self._lines):
            try:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing, one = sum(q.empty() for q in self._lines[n:]), self._first(n)
                raise ClusterError(
                    f"{missing} of {len(self._lines)} nodes did not {what} in time, node {one} among them{self._last(n)}"
                ) from None
            if not line:
                code = self._processes[n].wait()
                raise ClusterError(
                    f"node {self._first(n)} ended with code {code} before it could {what}{self._last(n)}"
                )
            found[n] = json.loads(line)
        return list(found.values())

    def _first(self, n: int) -> int:
        """The first node of the processes with number `n`."""
        return self._members[n].node

    def _last(self, n: int) -> str:
        lines = self._log(n)
        return f"; its last words: {' / '.join(lines[-3:])}" if lines else ""

    def said(self) -> list[str]:
        """The lines that nodes and agents logged, each once."""
        return sorted({line for n in range(len(self._members)) for line in self._log(n)})

    def _log(self, n: int) -> list[str]:
        name = f"n{self._first(n)}"
        logs = (self._root / f"{name}.log", self._root / name / "agent.log")
        return [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()]


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended: `hear` raises the reason
        process.stdin.write(line + "\n")
        process.stdin.flush()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put("")


class Load:
    """This machine's CPU while the block runs, from the moment `begin` of the monotonic clock."""

    def __init__(self, begin: float) -> None:
        self._begin, self._over = begin, threading.Event()
        self._samples: list[float] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        time.sleep(max(0.0, self._begin - time.monotonic()))
        psutil.cpu_percent()
        while not self._over.wait(0.2):
            self._samples.append(psutil.cpu_percent())

    @property
    def mean(self) -> float:
        return sum(self._samples) / max(1, len(self._samples))

    @property
    def saturated(self) -> float:
        return sum(sample >= _SATURATED for sample in self._samples) / max(1, len(self._samples))
