"""The side of the backend suite that runs in child processes: a compiler, and the steps that it is driven through.

``python SUBJECT.py STEPS``: STEPS is a JSON list; one JSON line with the outcome of each step is printed at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Subject(ABC):
    """A compiler with kcoord installed, made once a process by `main`. `build` uses it as a training script would."""

    @abstractmethod
    def build(self, number: int) -> bytes:
        """The code of kernel `number`, compiled or loaded by the compiler's public interface."""

    @abstractmethod
    def refuse(self) -> None:
        """Compile something that the compiler refuses. Raises its own exception."""

    @abstractmethod
    def compiles(self) -> int:
        """A count of the compiler's own runs in this process, without answers of any cache."""

    @abstractmethod
    def before_each_compile(self, pause: Callable[[], None]) -> None:
        """Have the compiler itself call `pause` as it begins."""

    def change(self, name: str) -> None:
        """Change an input, in this process, so that `build` gives other code: a row of `BackendSuite.changes`."""
        raise NotImplementedError(f"this subject cannot change {name!r}")


def main(kind: type[Subject]) -> None:
    """Run the steps of ``sys.argv[1]`` with a `kind`."""
    run = _Run(kind())
    outcomes = [run.step(*step) for step in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(outcomes) + "\n")


class _Run:
    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def step(self, name: str, *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def build(self, number: int) -> dict[str, Any]:
        return self._timed(lambda: self.subject.build(number).hex())

    def refuse(self) -> dict[str, Any]:
        return self._timed(self.subject.refuse)

    def held(self, began: str, gate: str) -> None:
        """From now on each compile makes the file `began`, and ends once there is a file `gate`; both with this process's id."""

        def pause() -> None:
            Path(f"{began}.{os.getpid()}").touch()
            while not Path(f"{gate}.{os.getpid()}").exists():
                time.sleep(0.01)

        self.subject.before_each_compile(pause)

    def change(self, name: str) -> None:
        self.subject.change(name)

    def interruptible(self) -> None:
        """From now on SIGALRM interrupts what is under way, as scripts bound a step."""

        def raises(number: int, frame: Any) -> None:
            raise TimeoutError("the step took too long")

        signal.signal(signal.SIGALRM, raises)

    def astray(self) -> None:
        """From now on the compiler's files record a GPU that nobody asked for."""
        from kcoord.rank import compilation

        vars(compilation)["recorded_targets"] = lambda directory: ("cuda:35",)

    def meet(self, gate: str) -> None:
        """Say that this process is ready, and wait for the others."""
        Path(f"{gate}.{os.getpid()}").touch()
        while not Path(gate).exists():
            time.sleep(0.01)

    def _timed(self, work: Callable[[], object]) -> dict[str, Any]:
        before = self.subject.compiles()
        outcome: dict[str, Any] = {}
        try:
            outcome["code"] = work()
        except Exception as error:  # noqa: BLE001 - an outcome, whatever it is
            outcome["error"] = type(error).__name__
        return {**outcome, "compiles": self.subject.compiles() - before}
