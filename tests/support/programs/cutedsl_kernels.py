"""CuTe DSL kernels for a GPU that need not be there. ``cutedsl_kernels.py MODE...`` prints one line of JSON."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

modes = set(sys.argv[1:])
if "torch" in modes:
    import torch
if not modes & {"launched", "differs"}:
    import kcoord

    kcoord.install()

import cutlass  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass._mlir.passmanager import PassManager  # noqa: E402
from cutlass.base_dsl.compiler import Compiler  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor  # noqa: E402

from tests.support.pass_managers import before_each_run  # noqa: E402

if "late" in modes:
    import torch  # noqa: F401
if "differs" in modes:
    native_compile = Compiler.compile

    def compile_with(self: Any, module: Any, pipeline: str, newer: int = 1, **keywords: Any) -> Any:
        return native_compile(self, module, pipeline, **keywords)

    Compiler.compile = compile_with
    import kcoord

    kcoord.install()
if hasattr(Compiler, "_check_cuda_dependencies_once"):  # before 4.5: of a GPU's driver
    Compiler._check_cuda_dependencies_once = lambda self, libraries: None

compiles: list[str] = []
before_each_run(PassManager, lambda text: "cuda-to-binary{" in text, lambda: compiles.append(""))


def refuse(*arguments: Any, **keywords: Any) -> Any:
    raise OSError(errno.ENOSPC, "no space is left")


def interrupt(*arguments: Any) -> Any:
    raise TimeoutError("the script's")


if "unserializable" in modes:
    from kcoord.backends import mlir

    mlir._headers = None
if modes & {"unwritable", "interrupted"}:
    signal.signal(signal.SIGALRM, interrupt)
    write_bytes = Path.write_bytes

    def write(path: Path, content: bytes) -> int:
        if path.name != "module.mlirbc":
            return write_bytes(path, content)
        refuse() if "unwritable" in modes else signal.raise_signal(signal.SIGALRM)
        return 0

    Path.write_bytes = write  # type: ignore[method-assign]


@cute.kernel
def scale(source: cute.Tensor, target: cute.Tensor):  # type: ignore[no-untyped-def]
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    at = block * 64 + thread
    target[at] = cute.math.exp(source[at]) * 3.0


@cute.jit
def run(source: cute.Tensor, target: cute.Tensor):  # type: ignore[no-untyped-def]
    scale(source, target).launch(grid=(cute.size(source) // 64, 1, 1), block=(64, 1, 1))


@cute.jit
def greet(number: cutlass.Int32):  # type: ignore[no-untyped-def]
    """Runs on this processor."""
    cute.printf("greetings {}", number)


def build(number: int) -> dict[str, str]:
    """Digests of the compiled module, and of the object file that CuTe DSL makes of it."""
    tensor = make_fake_compact_tensor(cutlass.Float32, (64 * number,))
    options = {"options": os.environ["OPTIONS"]} if os.environ.get("OPTIONS") else {}
    exports = "export" in modes
    function = cute.compile(run, tensor, tensor, no_jit_engine=not exports, **options)
    found = {"code": digest(str(function.ir_module).encode())}
    if exports:
        exported = Path(os.environ["TMPDIR"], f"{os.getpid()}.o")
        if "tvm-ffi" in os.environ.get("OPTIONS", ""):
            function.export_to_c(str(exported), function_name="run")
        else:
            function.export_to_c(file_path=str(exported.parent), file_name=exported.stem, function_prefix="run")
        found["object"] = digest(exported.read_bytes())
    return found


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if "call" in modes:
    greet(cutlass.Int32(3))
built = [build(number) for number in range(1, 1 + int(os.environ.get("KERNELS", "0" if "call" in modes else "1")))]
print(json.dumps({"built": built, "compiles": len(compiles)}))
