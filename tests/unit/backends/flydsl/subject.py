"""FlyDSL under the backend suite: code for a GPU that need not be there, of kernels that read values of all kinds."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

import kcoord

kcoord.install()

import flydsl.compiler as flyc  # noqa: E402
import flydsl.expr as fx  # noqa: E402
import torch  # noqa: E402
from flydsl._mlir.passmanager import PassManager  # noqa: E402

from kcoord.testing import Subject, main  # noqa: E402
from tests.support.pass_managers import before_each_run  # noqa: E402

SETTINGS = types.SimpleNamespace(by=3)
FACTORS = [5]
helpers = types.ModuleType("helpers")  # of no directory that FlyDSL looks into
exec("def helper():\n    return 7\n", vars(helpers))


def scaled(number: int) -> Any:
    factors = FACTORS

    @flyc.kernel
    def scale(source: fx.Tensor, target: fx.Tensor):  # type: ignore[no-untyped-def]
        at = fx.block_idx.x * 64 + fx.thread_idx.x
        target[at] = source[at] * fx.Float32(number * SETTINGS.by * factors[0] * helpers.helper())

    @flyc.jit
    def run(source: fx.Tensor, target: fx.Tensor):  # type: ignore[no-untyped-def]
        scale(source, target).launch(grid=(number, 1, 1), block=(64, 1, 1))

    return run


class FlyDSL(Subject):
    def __init__(self) -> None:
        self.count = 0
        self.pause: Callable[[], None] = lambda: None
        before_each_run(PassManager, lambda text: "format=fatbin" in text, self.begins)

    def begins(self) -> None:
        self.count += 1
        self.pause()

    def build(self, number: int) -> bytes:
        function = scaled(number)
        function(torch.ones(64 * number), torch.ones(64 * number))
        (compiled,) = function._mem_cache.values()
        return str(compiled._ir_text).encode()

    def refuse(self) -> None:
        os.environ["ROCM_PATH"] = "/nowhere"  # no linker
        self.build(8)

    def compiles(self) -> int:
        return self.count

    def before_each_compile(self, pause: Callable[[], None]) -> None:
        self.pause = pause

    def change(self, name: str) -> None:
        if name == "an attribute of a global object":
            SETTINGS.by = 4
        elif name == "a list in a closure":
            FACTORS[0] = 6
        elif name == "a helper elsewhere":
            exec("def helper():\n    return 8\n", vars(helpers))
        else:
            os.environ[name] = "gfx950"


if __name__ == "__main__":
    main(FlyDSL)
