"""TileLang under the backend suite: C for this processor, which runs, or code for a GPU that need not be there."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kcoord

kcoord.install()

os.environ["TILELANG_PRINT_ON_COMPILATION"] = "0"
os.environ["TL_TEMPLATE_PATH"] = os.environ["TEMPLATES"]  # a copy, which a row edits

import tilelang  # noqa: E402
import tilelang.language as T  # noqa: E402
import torch  # noqa: E402
from tilelang.contrib import nvcc  # noqa: E402
from tilelang.jit import JITKernel  # noqa: E402

from kcoord.testing import Subject, main  # noqa: E402

IS_FOR_GPU = os.environ.get("FOR") == "cuda"
BY = 3
EDIT = "\n#define expf logf\n"


def scaled(number: int) -> Any:
    by, threads = BY, 32 if IS_FOR_GPU else 1

    @T.prim_func
    def scale(source: T.Tensor((number,), "float32"), target: T.Tensor((number,), "float32")):  # type: ignore[no-untyped-def]
        with T.Kernel(1, threads=threads) as _:
            for i in T.serial(number):
                target[i] = T.exp(source[i]) / T.float32(by)

    return scale


class TileLang(Subject):
    def __init__(self) -> None:
        self.template = Path(os.environ["TEMPLATES"], "tl_templates", "cuda" if IS_FOR_GPU else "cpp", "common.h")
        before = self.template.read_text()
        if EDIT in before:  # by another process, which has ended
            self.template.write_text(before.removesuffix(EDIT))
        self.count = 0
        self.pause: Callable[[], None] = lambda: None
        counted = (nvcc, "compile_cuda") if IS_FOR_GPU else (JITKernel, "_compile_and_create_adapter")
        self.where = {"kind": "cuda", "arch": os.environ.get("ARCH", "sm_90a")} if IS_FOR_GPU else "c"
        native = getattr(*counted)

        def count(*arguments: Any, **keywords: Any) -> Any:
            self.count += 1
            self.pause()
            return native(*arguments, **keywords)

        setattr(*counted, count)

    def build(self, number: int) -> bytes:
        backend = "tvm_ffi" if IS_FOR_GPU else "cython"
        kernel = tilelang.compile(scaled(number), out_idx=[1], target=self.where, execution_backend=backend)
        if not IS_FOR_GPU:
            return bytes(kernel(torch.ones(number)).numpy().tobytes())
        library = getattr(kernel.adapter, "libpath", None)
        if library is None:  # just compiled
            library = str(Path(os.environ["HOME"], f"{os.getpid()}.so"))
            kernel.adapter.get_exportable_executable().export_library(library)
        return machine_code(Path(library).read_bytes())

    def refuse(self) -> None:
        backend = "tvm_ffi" if IS_FOR_GPU else "cython"
        flags = ["--no-such-flag"]
        tilelang.compile(scaled(8), target=self.where, execution_backend=backend, compile_flags=flags)

    def compiles(self) -> int:
        return self.count

    def before_each_compile(self, pause: Callable[[], None]) -> None:
        self.pause = pause

    def change(self, name: str) -> None:
        if name == "a global":
            globals()["BY"] = 4
        elif name == "NVCC_APPEND_FLAGS":
            os.environ[name] = "-use_fast_math"
        else:
            self.template.write_text(self.template.read_text() + EDIT)


def machine_code(library: bytes) -> bytes:
    """The instructions of the cubin in `library`; its other sections hold names that change."""
    at = next(
        i for i in range(len(library)) if library[i : i + 4] == b"\x7fELF" and library[i + 18 : i + 20] == b"\xbe\0"
    )
    sections, size, count = *struct.unpack_from("<Q", library, at + 40), *struct.unpack_from("<HH", library, at + 58)
    code = hashlib.sha256()
    for each in range(count):
        _, kind, flags, _, offset, length = struct.unpack_from("<IIQQQQ", library, at + sections + each * size)
        if kind == 1 and flags & 4:  # its own, and executable
            code.update(library[at + offset : at + offset + length])
    return code.digest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(TileLang)
