"""A compile function under the backend suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import kcoord
from kcoord.testing import Subject, main


class CompileError(Exception):
    pass


class Compiler:
    """Its state is none of the function's inputs: the function ignores it."""

    count = 0
    pause: Callable[[], None] = staticmethod(lambda: None)


compiler = Compiler()
FACTOR = 3


def load(artifact: kcoord.Artifact) -> bytes:
    return (artifact.path / "kernel.txt").read_bytes()


@kcoord.compile_once(scope=kcoord.Scope.TARGET, load=load, ignore=["compiler"], on_drift="rekey")
def make(number: int, *, staging: Path) -> None:
    compiler.count += 1
    compiler.pause()
    if number < 0:
        raise CompileError(number)
    (staging / "kernel.txt").write_text(f"kernel {number} × {FACTOR}")


class Python(Subject):
    def build(self, number: int) -> bytes:
        code: bytes = make(number)
        return code

    def refuse(self) -> None:
        make(-1)

    def compiles(self) -> int:
        return compiler.count

    def before_each_compile(self, pause: Callable[[], None]) -> None:
        compiler.pause = pause

    def change(self, name: str) -> None:
        global FACTOR
        FACTOR = 4


if __name__ == "__main__":
    main(Python)
