"""FlyDSL kernels for a GPU that need not be there. ``flydsl_kernels.py MODE...`` prints one line of JSON."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

modes = set(sys.argv[1:])
if not modes & {"launched", "differs"}:
    import kcoord

    kcoord.install()

import flydsl.compiler as flyc  # noqa: E402
import flydsl.expr as fx  # noqa: E402
import torch  # noqa: E402
from flydsl.compiler import backends, jit_function, kernel_function, llvm_options  # noqa: E402

if "differs" in modes:
    native_compile = jit_function.MlirCompiler.compile

    def compile_with(cls: Any, module: Any, *, newer: int = 1, **arguments: Any) -> Any:
        return native_compile(module, **arguments)

    jit_function.MlirCompiler.compile = classmethod(compile_with)
    import kcoord

    kcoord.install()

compiles: list[str] = []
native_run = jit_function._run_pipeline


def run_pipeline(*arguments: Any, **keywords: Any) -> Any:
    compiles.append(os.environ["ARCH"])
    time.sleep(float(os.environ.get("SLOW", "0")))
    return native_run(*arguments, **keywords)


jit_function._run_pipeline = run_pipeline


class Astray:
    """A backend whose code is for another GPU than it says."""

    def __init__(self, said: Any, done: Any) -> None:
        self.target, self._done = said.target, done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._done, name)


def astray(name: str | None = None, *, arch: str = "") -> Any:
    return Astray(backends.get_backend(name, arch=arch), backends.get_backend(name, arch="gfx950"))


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


@contextlib.contextmanager
def met() -> Iterator[None]:
    """Begins when all processes of the test are ready."""
    gate = os.environ.get("GATE")
    if gate:
        Path(f"{gate}.{os.getpid()}").touch()
        while not Path(gate).exists():
            time.sleep(0.01)
    yield


if "astray" in modes:
    jit_function.get_backend = astray
if "hints" in modes:
    scaled.compile_hints = {"fast_fp_math": True}
options = {"enable-post-misched": False} if "options" in modes else {}
with met(), llvm_options.llvm_options(options):
    begun = time.perf_counter()
    codes = [build(by) for by in range(1, 1 + int(os.environ.get("KERNELS", "1")))]
    seconds = time.perf_counter() - begun
print(json.dumps({"codes": codes, "compiles": compiles, "seconds": seconds}))
