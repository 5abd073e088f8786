"""A conformance suite for backends. Inherit `BackendSuite` in a test module, and name the program that drives the compiler::

    from kcoord.testing.backends import BackendSuite

    class TestMine(BackendSuite):
        program = Path(__file__).with_name("subject.py")
        error = "MyCompileError"

Every test starts processes of its own, with a local directory of its own. It shows that the backend shares what it may and
nothing else; it does not show that a key is complete, beyond the stale rows that the subject names.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import psutil
import pytest

from kcoord.artifacts.catalog import local_manifests
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

Started = subprocess.Popen[str]
Start = Callable[[Sequence[str], Mapping[str, str], Path], Started]
Environ = Mapping[str, str]
NOTHING: Environ = MappingProxyType({})
_LONG = 120.0  # seconds: the bound of every process


class World:
    """A local directory, and processes that use it, with `environ`. ``python(arguments, environ, cwd)`` starts one."""

    def __init__(self, root: Path, program: Path, environ: Mapping[str, str], python: Start) -> None:
        self.root, self.program, self._python = root, program, python
        self._started: list[Started] = []
        self.local = root / "local"
        kept = {n: v for n, v in os.environ.items() if not n.startswith("KCOORD_") and not n.endswith("_CACHE_DIR")}
        places = {"KCOORD_LOCAL_DIR": str(self.local), "HOME": str(root), "XDG_CACHE_HOME": str(root / "cache")}
        self.environ = {**kept, **places, **environ}
        self.held = ["held", str(root / "began"), str(root / "release")]  # a step: compiles begin, and end by `release`

    def start(self, *steps: list[Any], cwd: Path | None = None, environ: Environ = NOTHING) -> Started:
        """A process that goes through `steps` (`kcoord.testing.subject`)."""
        command = [str(self.program), json.dumps(steps)]
        process = self._python(command, {**self.environ, **environ}, cwd or self.root)
        self._started.append(process)
        return process

    def run(self, *steps: list[Any], cwd: Path | None = None, environ: Environ = NOTHING) -> list[Any]:
        return self.outcomes(self.start(*steps, cwd=cwd, environ=environ))

    def outcomes(self, process: Started) -> list[Any]:
        """The outcome of each step. A process that fails fails the test."""
        try:
            out, err = process.communicate(timeout=_LONG)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"a process did not end within {_LONG:g} s:\n{process.communicate()[1]}")
        assert process.returncode == 0, err
        assert "please report it" not in err
        assert "stands aside from" not in err
        outcomes: list[Any] = json.loads(out.splitlines()[-1])
        return outcomes

    def together(self, count: int, *steps: list[Any], environs: Sequence[Environ] = (NOTHING,)) -> list[list[Any]]:
        """`count` processes that go through `steps` at the same time, with `environs` in turn."""
        gate = str(self.root / "gate")
        turns = itertools.islice(itertools.cycle(environs), count)
        processes = [self.start(["meet", gate], *steps, environ=environ) for environ in turns]
        until(lambda: len(list(self.root.glob("gate.*"))) == count or any(p.poll() is not None for p in processes))
        Path(gate).touch()
        return [self.outcomes(process)[1:] for process in processes]

    def artifacts(self) -> list[Path]:
        return [manifest.parent for manifest in local_manifests(self.local)]

    def began(self) -> set[int]:
        """The processes with the step `held` whose compile has begun."""
        return {int(path.suffix[1:]) for path in self.root.glob("began.*")}

    def release(self, processes: set[int]) -> None:
        """Let their compiles end."""
        for process in processes:
            Path(f"{self.held[2]}.{process}").touch()

    def waiters(self) -> int:
        """The number of processes that wait for another that compiles."""
        client = AgentClient(Settings.from_environ({**self.environ, "KCOORD_SPAWN": "0"}), Notices())
        try:
            status = client.status(quietly=True)
        finally:
            client.close()
        return sum(len(flight["waiting"]) for flight in status["flights"]) if status else 0

    def processes(self) -> list[psutil.Process]:
        """The agent, and whatever else runs with this local directory."""
        own = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # a zombie has no environment
                if process.environ().get("KCOORD_LOCAL_DIR") == self.environ["KCOORD_LOCAL_DIR"]:
                    own.append(process)
        return own

    def close(self) -> None:
        """End all of its processes."""
        running: list[Started | psutil.Process] = [*self._started, *self.processes()]
        for process in running:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for started in self._started:
            started.wait(_LONG)
        until(lambda: not self.processes())


def until(condition: Any) -> None:
    """Wait for `condition`, bounded."""
    deadline = time.monotonic() + _LONG
    while not condition():
        assert time.monotonic() < deadline, "it still did not happen"
        time.sleep(0.01)


class BackendSuite:
    """Set `program` and `error`; the others as they apply."""

    program: ClassVar[Path]
    """It ends with ``main(MySubject)``: see `kcoord.testing.Subject`."""
    error: ClassVar[str]
    """The class name of the exception that `Subject.refuse` raises."""
    interrupted: ClassVar[str] = "TimeoutError"
    """The exception that leaves the compiler when a signal's handler raises `TimeoutError` in it."""
    failure_elsewhere: ClassVar[str] = ""
    """The exception in processes that waited for a failing compile, and compiled in vain, if it is not the compiler's own."""
    targets: ClassVar[tuple[Environ, ...]] = ()
    """Variables of two processes, by which `Subject.build` compiles for one GPU and for another, whether they are there or not.
    None: its artifacts record no GPU."""
    changes: ClassVar[tuple[str, ...]] = ()
    """The stale rows: inputs that `Subject.change` changes."""

    def environment(self, root: Path) -> Mapping[str, str]:
        """Further variables for the processes; may write files below `root`, a fresh directory."""
        return {}

    def python(self, arguments: Sequence[str], environ: Mapping[str, str], cwd: Path) -> Started:
        """Start ``python *arguments`` with these variables alone, and with its output and errors captured as text.

        Override it if the compiler takes long to import, by a process that is forked from one that has it imported. Of its
        methods `poll`, `wait`, `communicate`, `send_signal` and `kill` are used.
        """
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *arguments], env=environ, cwd=cwd, stdout=pipe, stderr=pipe, text=True
        )  # fmt: skip

    @pytest.fixture
    def world(self) -> Iterator[World]:
        root = Path(tempfile.mkdtemp(prefix="kc-", dir="/tmp"))  # a Unix socket's path is at most 108 bytes long
        world = World(root, self.program, self.environment(root), self.python)
        try:
            yield world
        finally:
            world.close()
            shutil.rmtree(root, ignore_errors=True)

    def test_four_cold_processes_compile_a_kernel_once_and_a_warm_one_not_at_all(self, world: World) -> None:
        outcomes = world.together(4, ["build", 1], ["build", 2])
        for kernel in range(2):
            assert sum(each[kernel]["compiles"] for each in outcomes) == 1
            assert len({each[kernel]["code"] for each in outcomes}) == 1
        (warm,) = world.run(["build", 1])
        assert (warm["compiles"], warm["code"]) == (0, outcomes[0][0]["code"])

    def test_a_failing_compile_raises_the_compilers_own_exception_everywhere_and_in_parallel(
        self, world: World
    ) -> None:
        """And the processes that waited compile at the same time: none ends before all have begun."""
        processes = [world.start(world.held, ["refuse"]) for _ in range(4)]
        until(lambda: world.began() or any(p.poll() for p in processes))
        until(lambda: world.waiters() == 3 or any(p.poll() for p in processes))
        world.release(first := world.began())
        others = [p for p in processes if p.pid not in first]
        until(lambda: len(world.began()) == 4 or all(p.poll() is not None for p in others))
        world.release(world.began() - first)
        errors = sorted(world.outcomes(process)[1]["error"] for process in processes)
        assert errors == sorted([self.error, *[self.failure_elsewhere or self.error] * 3])

    def test_an_abandoned_compile_is_taken_over_while_its_process_lives(self, world: World) -> None:
        gate = str(world.root / "gate")
        first = world.start(world.held, ["interruptible"], ["build", 1], ["meet", gate])
        until(lambda: world.began() or first.poll() is not None)
        second = world.start(["build", 1])
        until(lambda: world.waiters() or second.poll() is not None)
        first.send_signal(signal.SIGALRM)
        (built,) = world.outcomes(second)
        assert (built["compiles"], "code" in built) == (1, True)
        assert first.poll() is None
        Path(gate).touch()
        assert world.outcomes(first)[2]["error"] == self.interrupted

    def test_a_killed_leader_is_followed_by_another(self, world: World) -> None:
        leader = world.start(world.held, ["build", 1])
        until(lambda: world.began() or leader.poll() is not None)
        follower = world.start(["build", 1])
        leader.kill()
        leader.communicate()
        (built,) = world.outcomes(follower)
        assert (built["compiles"], "code" in built) == (1, True)

    def test_a_full_disk_costs_no_kernel(self, world: World) -> None:
        world.local.mkdir(exist_ok=True)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", world.local], capture_output=True)
        if mounted.returncode:
            pytest.skip("needs the right to mount a tmpfs")
        try:
            (world.local / "filler").write_bytes(b"x" * (1 << 20))
            (built,) = world.run(["build", 1])
            assert (built["compiles"], "code" in built) == (1, True)
        finally:
            world.close()
            subprocess.run(["umount", "-l", world.local], check=True)

    def test_a_corrupt_file_is_compiled_again(self, world: World) -> None:
        (first,) = world.run(["build", 1])
        for home in world.artifacts():
            for path in home.rglob("*"):
                if path.is_file():
                    content = path.read_bytes()
                    path.chmod(0o600)
                    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        (again,) = world.run(["build", 1])
        assert (again["compiles"], again["code"]) == (1, first["code"])

    def test_code_for_another_gpu_is_not_shared(self, world: World) -> None:
        if not self.targets:
            pytest.skip("its artifacts record no GPU")
        _, first = world.run(["astray"], ["build", 1])
        (second,) = world.run(["build", 1])
        assert (first["compiles"], second["compiles"]) == (1, 1)
        assert second["code"] == first["code"]

    def test_ranks_of_two_gpus_compile_for_each_once(self, world: World) -> None:
        if not self.targets:
            pytest.skip("its artifacts record no GPU")
        oracle = []
        for number, target in enumerate(self.targets):
            private = {"HOME": str(world.root / f"oracle-{number}"), "KCOORD_DISABLE": "1"}
            oracle.append(world.run(["build", 1], environ={**target, **private})[0]["code"])
        assert len(set(oracle)) == len(self.targets)
        outcomes = [built for (built,) in world.together(2 * len(self.targets), ["build", 1], environs=self.targets)]
        for code in oracle:
            assert [each["code"] for each in outcomes].count(code) == 2
            assert sum(each["compiles"] for each in outcomes if each["code"] == code) == 1

    def test_a_key_is_the_same_in_every_process_that_asks_for_the_same(self, world: World) -> None:
        """With another hash seed and working directory, and the subject imported rather than run as ``__main__``."""
        (first,) = world.run(["build", 1])  # a seed at random
        elsewhere = world.root / "elsewhere"
        elsewhere.mkdir()
        imports = world.root / "imports.py"
        imports.write_text(
            f"import sys\nsys.path.insert(0, {str(self.program.parent)!r})\n"
            f"import {self.program.stem} as subject\nfrom kcoord.testing.subject import Subject, main\n"
            "main(next(c for c in vars(subject).values() if isinstance(c, type) and c.__module__ == subject.__name__\n"
            "          and issubclass(c, Subject)))\n"
        )
        world.program = imports
        (imported,) = world.run(["build", 1], cwd=elsewhere, environ={"PYTHONHASHSEED": "2"})
        assert (imported["compiles"], imported["code"]) == (0, first["code"])

    def test_a_changed_input_is_never_served_old_code(self, world: World) -> None:
        """In the same process and in a new one; the oracle is a process without kcoord and with an empty cache."""
        for row in self.changes:
            oracle = {"HOME": str(world.root / f"oracle-{row}"), "KCOORD_DISABLE": "1"}
            _, true = world.run(["change", row], ["build", 1], environ=oracle)
            before, _, changed = world.run(["build", 1], ["change", row], ["build", 1])
            _, fresh = world.run(["change", row], ["build", 1])
            assert before["code"] != true["code"], row
            assert (changed["code"], fresh["code"]) == (true["code"], true["code"]), row
