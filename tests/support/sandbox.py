"""A clean environment for a test, and a sandbox that notices what a test leaves behind."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import forked, living, toolchain
from tests.support.environment import clean_environ
from tests.support.forkserver import Forked
from tests.support.processes import WITH_KCOORD, with_agents_forked
from tests.support.shared_servers import fork_server
from tests.support.waiting import eventually as eventually

PROGRAMS = Path(__file__).parent / "programs"
WITH_TORCH, WITH_TRITON = "tests.support.with_torch", "tests.support.with_triton"
Started = subprocess.Popen[str] | Forked


class Sandbox:
    """A short directory (a Unix socket's path is at most 108 bytes), and processes whose settings point into it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.environment = {
            **clean_environ(),
            "KCOORD_LOCAL_DIR": str(root / "local"),
            "TMPDIR": str(root / "tmp"),
            "XDG_CACHE_HOME": str(root / "cache"),
            "TRITON_DEFAULT_FP_FUSION": "1",  # Triton 3.9 warns without it
            "PYTHONUNBUFFERED": "1",
        }
        (root / "tmp").mkdir()
        toolchain.share(self.local)

    @property
    def local(self) -> Path:
        return self.root / "local"

    @property
    def is_untouched(self) -> bool:
        """True if no process has written anything into the local directory."""
        return [path.name for path in self.local.iterdir()] == ["toolchain"]

    def env(self, **more: str | None) -> dict[str, str]:
        merged = {**self.environment, **more}
        return {k: v for k, v in merged.items() if v is not None}

    def start(self, *arguments: str | Path, **more: str | None) -> subprocess.Popen[str]:
        """``python *arguments`` in this sandbox, with its output captured."""
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=self.env(**more),
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *arguments: str | Path, timeout: float = 120, **more: str | None) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, **more)
        return finish(process, timeout)

    def fork(self, *arguments: str | Path, preload: str = WITH_TORCH, **more: str | None) -> Started:
        """As `start`, but the process has `preload` imported already, if its variables allow that."""
        server, environ = fork_server((preload,)), self.env(**more)
        if not server.serves(environ):
            return self.start(*arguments, **more)
        return server.start([*map(str, arguments)], with_agents_forked(environ), self.root)

    def fork_torchrun(self, *arguments: str | Path, **more: str | None) -> Started:
        """As `fork`, for a torchrun whose ranks are forked, too."""
        return self.fork(*arguments, **more, **{forked.RANKS: fork_server((WITH_TORCH,)).address})

    def fork_kcoord(self, *arguments: str | Path, **more: str | None) -> Started:
        """As `fork`, for a program of kcoord alone."""
        return self.fork(*arguments, preload=WITH_KCOORD, **more)

    def run_kcoord(
        self, *arguments: str | Path, timeout: float = 120, **more: str | None
    ) -> subprocess.CompletedProcess[str]:
        return finish(self.fork_kcoord(*arguments, **more), timeout)

    def run_forked(
        self, *arguments: str | Path, timeout: float = 120, **more: str | None
    ) -> subprocess.CompletedProcess[str]:
        return finish(self.fork(*arguments, **more), timeout)

    def run_torchrun(
        self, *arguments: str | Path, timeout: float = 120, **more: str | None
    ) -> subprocess.CompletedProcess[str]:
        return finish(self.fork_torchrun(*arguments, **more), timeout)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs with this sandbox's settings."""
        return living.those_within(self.root)


def finish(process: Started, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Wait for a process that `Sandbox` started; one that outlasts `timeout` fails the test."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"{process.args} did not end within {timeout} s:\n{out}\n{err}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@contextlib.contextmanager
def sandboxed() -> Iterator[Sandbox]:
    """A sandbox; agents that ranks started are stopped at the end, and nothing else may be left running."""
    root = Path(tempfile.mkdtemp(prefix="kc-", dir="/tmp"))
    box = Sandbox(root)
    try:
        yield box
        for agent in living.agents_of(box.processes()):
            with contextlib.suppress(psutil.NoSuchProcess):
                agent.terminate()
        eventually(lambda: not box.processes(), what="all processes of the test ended")
    finally:
        living.kill(box.processes())
        shutil.rmtree(root, ignore_errors=True)
