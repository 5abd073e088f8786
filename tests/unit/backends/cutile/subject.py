"""cuTile under the backend suite: code for a GPU that need not be there."""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kcoord

kcoord.install()

import cuda.tile as ct  # noqa: E402
from cuda.tile import _compile  # noqa: E402
from cuda.tile.compilation import (  # noqa: E402
    ArrayConstraint,
    CallingConvention,
    ConstantConstraint,
    KernelSignature,
    export_kernel,
)

from kcoord.testing import Subject, main  # noqa: E402

BY = 3.0


def helper(value: Any) -> Any:
    return value


def scaled(minus: float) -> Any:
    def scale(source, target, tile: ct.Constant[int], plus: ct.Constant[float]):  # type: ignore[no-untyped-def]
        at = ct.bid(0)
        value = ct.load(source, index=(at,), shape=(tile,))
        ct.store(target, index=(at,), tile=helper(value) * BY + plus - minus)

    return scale


class CuTile(Subject):
    def __init__(self) -> None:
        self.count = 0
        self.pause: Callable[[], None] = lambda: None
        self.sm = os.environ["SM"]
        self.plus, self.minus = 5.0, 1.0
        self.options: dict[str, Any] = {}
        native = _compile._CompilerBinary.run

        def run(binary: Any, args: list[str], *more: Any, **keywords: Any) -> None:
            if not Path(args[0]).name.startswith(
                "probe"
            ):  # cuTile asks each process's compiler for its version of bytecode
                self.count += 1
                self.pause()
            native(binary, args, *more, **keywords)

        _compile._CompilerBinary.run = run

    def build(self, number: int) -> bytes:
        array = ArrayConstraint(
            dtype=ct.float32, ndim=1, index_dtype=ct.int32, stride_lower_bound_incl=0, alias_groups=(),
            may_alias_internally=False,
        )  # fmt: skip
        constants = ConstantConstraint(16 << number), ConstantConstraint(self.plus)
        convention = CallingConvention.cutile_python_v1()
        signature = KernelSignature([array, array, *constants], calling_convention=convention)
        cubin = io.BytesIO()
        kernel = ct.kernel(scaled(self.minus), **self.options)
        export_kernel(kernel, [signature], cubin, gpu_code=self.sm, output_format="cubin")
        return cubin.getvalue()

    def refuse(self) -> None:
        self.sm = "sm_35"
        self.build(1)

    def compiles(self) -> int:
        return self.count

    def before_each_compile(self, pause: Callable[[], None]) -> None:
        self.pause = pause

    def change(self, name: str) -> None:
        global BY
        if name == "a global":
            BY = 4.0
        elif name == "a closure":
            self.minus = 2.0
        elif name == "a constant argument":
            self.plus = 6.0
        elif name == "a helper":
            globals()["helper"] = other
        elif name == "the GPU":
            self.sm = "sm_120"
        elif name == "the debugger":
            _compile.EXPERIMENTAL_CUDA_TILE_DEBUG_BUILD = True
        else:
            self.options = {"opt_level": 0}


def other(value: Any) -> Any:
    return value * value


if __name__ == "__main__":
    main(CuTile)
