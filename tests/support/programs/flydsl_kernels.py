"""FlyDSL kernels for a GPU that need not be there. ``flydsl_kernels.py MODE...`` prints one line of JSON."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

modes = set(sys.argv[1:])
if not modes & {"launched", "differs"}:
    import kcoord

    kcoord.install()

import flydsl.compiler as flyc  # noqa: E402
import flydsl.expr as fx  # noqa: E402
import torch  # noqa: E402
from flydsl._mlir.passmanager import PassManager  # noqa: E402
from flydsl.compiler import jit_function, kernel_function, llvm_options  # noqa: E402

from tests.support.pass_managers import before_each_run  # noqa: E402

if "differs" in modes:
    native_compile = jit_function.MlirCompiler.compile

    def compile_with(cls: Any, module: Any, *, newer: int = 1, **arguments: Any) -> Any:
        return native_compile(module, **arguments)

    jit_function.MlirCompiler.compile = classmethod(compile_with)
    import kcoord

    kcoord.install()

compiles: list[str] = []
before_each_run(PassManager, lambda text: "format=fatbin" in text, lambda: compiles.append(os.environ["ARCH"]))


def link() -> None:
    if "links" in modes:
        kernel_function.CompilationContext.get_current().add_link_lib(os.environ["LIBRARY"])


@flyc.kernel
def scale(source: fx.Tensor, target: fx.Tensor, by: fx.Constexpr[int]):  # type: ignore[no-untyped-def]
    at = fx.block_idx.x * 64 + fx.thread_idx.x
    target[at] = source[at] * fx.Float32(by)


@flyc.jit
def scaled(source: fx.Tensor, target: fx.Tensor, by: fx.Constexpr[int]):  # type: ignore[no-untyped-def]
    link()
    scale(source, target, by).launch(grid=(1, 1, 1), block=(64, 1, 1))


def build(by: int) -> str:
    """The digest of what was compiled last."""
    scaled(torch.ones(64), torch.ones(64), by)
    compiled = list(scaled._mem_cache.values())[-1]
    return hashlib.sha256(compiled._ir_text.encode()).hexdigest()


if "hints" in modes:
    scaled.compile_hints = {"fast_fp_math": True}
options = {"enable-post-misched": False} if "options" in modes else {}
with llvm_options.llvm_options(options):
    codes = [build(2)]
print(json.dumps({"codes": codes, "compiles": compiles}))
