"""CuTe DSL under the backend suite: code for a GPU that need not be there."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import kcoord

kcoord.install()

import cutlass  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass._mlir.passmanager import PassManager  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor  # noqa: E402

from kcoord.testing import Subject, main  # noqa: E402
from tests.support.pass_managers import before_each_run  # noqa: E402

BY = 3.0
SETTINGS = types.SimpleNamespace(plus=5.0)


def helper(value: Any) -> Any:
    return value


def scaled(minus: float) -> Any:
    @cute.kernel
    def scale(source: cute.Tensor, target: cute.Tensor, factor: cutlass.Constexpr):  # type: ignore[no-untyped-def]
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        at = block * 64 + thread
        target[at] = helper(source[at]) / BY * factor + SETTINGS.plus - minus

    return scale


scale = scaled(1.0)


@cute.jit
def run(source: cute.Tensor, target: cute.Tensor, factor: cutlass.Constexpr):  # type: ignore[no-untyped-def]
    scale(source, target, factor).launch(grid=(cute.size(source) // 64, 1, 1), block=(64, 1, 1))


class CuTeDSL(Subject):
    def __init__(self) -> None:
        self.count = 0
        self.options = "--opt-level=3"
        self.factor = 7.0
        self.pause: Callable[[], None] = lambda: None
        before_each_run(PassManager, lambda text: "cuda-to-binary{" in text, self.begins)

    def begins(self) -> None:
        self.count += 1
        self.pause()

    def build(self, number: int) -> bytes:
        tensor = make_fake_compact_tensor(cutlass.Float32, (64 * number,))
        function = cute.compile(run, tensor, tensor, self.factor, options=self.options, no_jit_engine=True)
        return str(function.ir_module).encode()

    def refuse(self) -> None:
        self.options = "--ptxas-options=--no-such-option"
        self.build(8)

    def compiles(self) -> int:
        return self.count

    def before_each_compile(self, pause: Callable[[], None]) -> None:
        self.pause = pause

    def change(self, name: str) -> None:
        global BY, scale
        if name == "a global":
            BY = 4.0
        elif name == "an attribute of a global object":
            SETTINGS.plus = 6.0
        elif name == "a closure":
            scale = scaled(2.0)
        elif name == "a constexpr argument":
            self.factor = 8.0
        elif name == "a helper":
            globals()["helper"] = lambda value: value * value
        elif name == "the GPU":
            self.options = "--gpu-arch=sm_100a"
        else:
            self.options = name


if __name__ == "__main__":
    main(CuTeDSL)
