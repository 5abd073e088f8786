"""One rank that compiles with COMPILER (``compilers_job.py COMPILER``), cold or warm. Run it with torchrun.

Rank 0 prints one line of JSON: wall seconds from barrier to barrier, and the compiles of all ranks together.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.pass_managers import before_each_run

compiles = 0
ct: Any = None  # compilers look for the names of annotations here
cute: Any = None
fx: Any = None


def count(place: Any, name: str) -> None:
    """Count the calls of ``place.name``, the compiler's own."""
    native = getattr(place, name)

    def counting(*arguments: Any, **keywords: Any) -> Any:
        counted()
        return native(*arguments, **keywords)

    setattr(place, name, counting)


def counted() -> None:
    global compiles
    compiles += 1


def extension() -> Callable[[], None]:
    """``torch.utils.cpp_extension.load_inline`` of one function that includes torch's headers."""
    from torch.utils import cpp_extension

    count(cpp_extension, "_run_ninja_build")
    source = "torch::Tensor twice(torch::Tensor x) { return x * 2; }"

    def compile() -> None:
        module = cpp_extension.load_inline("twice", cpp_sources=[source], functions=["twice"])
        assert torch.equal(module.twice(torch.ones(2)), torch.full((2,), 2.0))

    return compile


def tvm_ffi() -> Callable[[], None]:
    """``tvm_ffi.cpp.load_inline`` of one function."""
    import tvm_ffi.cpp

    native = subprocess.run

    def run(*arguments: Any, **keywords: Any) -> Any:
        global compiles
        command = keywords.get("args") or arguments[0]
        compiles += command[0] == "ninja" and "compdb" not in command
        return native(*arguments, **keywords)

    subprocess.run = run  # type: ignore[assignment]

    def compile() -> None:
        source = "int twice(int x) { return 2 * x; }"
        assert tvm_ffi.cpp.load_inline("twice", cpp_sources=source, functions=["twice"]).twice(4) == 8

    return compile


def tilelang() -> Callable[[], None]:
    """Two GEMMs for ``sm_90a``, and a kernel in C."""
    import tilelang as compiler
    import tilelang.language as T
    from tilelang.jit import JITKernel

    count(JITKernel, "_compile_and_create_adapter")

    def gemm(size: int, block: int) -> Any:
        @T.prim_func
        def kernel(
            a: T.Tensor((size, size), "float16"),
            b: T.Tensor((size, size), "float16"),
            c: T.Tensor((size, size), "float16"),
        ):  # type: ignore[no-untyped-def]
            with T.Kernel(size // block, size // block, threads=128) as (x, y):
                left, right = T.alloc_shared((block, 32), "float16"), T.alloc_shared((32, block), "float16")
                sums = T.alloc_fragment((block, block), "float32")
                T.clear(sums)
                for k in T.Pipelined(size // 32, num_stages=2):
                    T.copy(a[y * block, k * 32], left)
                    T.copy(b[k * 32, x * block], right)
                    T.gemm(left, right, sums)
                T.copy(sums, c[y * block, x * block])

        return kernel

    def scaled(size: int) -> Any:
        @T.prim_func
        def kernel(a: T.Tensor((size,), "float32"), b: T.Tensor((size,), "float32")):  # type: ignore[no-untyped-def]
            with T.Kernel(1) as _:
                for i in T.serial(size):
                    b[i] = a[i] * T.float32(2)

        return kernel

    def compile() -> None:
        for block in (64, 128):
            where = {"kind": "cuda", "arch": "sm_90a"}
            compiler.compile(gemm(1024, block), out_idx=[2], target=where, execution_backend="tvm_ffi")
        kernel = compiler.compile(scaled(16), out_idx=[1], target="c", execution_backend="cython")
        assert kernel(torch.ones(16)).sum() == 32

    return compile


def cutedsl() -> Callable[[], None]:
    """Two kernels of ``cute.compile`` for ``sm_90a``, which asks no cache."""
    global cute
    import cutlass
    from cutlass import cute
    from cutlass._mlir.passmanager import PassManager
    from cutlass.cute.runtime import make_fake_compact_tensor

    before_each_run(PassManager, lambda text: "cuda-to-binary{" in text, counted)

    def polynomial(degree: int) -> Any:
        @cute.kernel
        def evaluate(source: cute.Tensor, target: cute.Tensor):  # type: ignore[no-untyped-def]
            thread, _, _ = cute.arch.thread_idx()
            found = source[thread]
            for each in cutlass.range_constexpr(degree):
                found = found * source[thread] + float(each)
            target[thread] = found

        @cute.jit
        def run(source: cute.Tensor, target: cute.Tensor):  # type: ignore[no-untyped-def]
            evaluate(source, target).launch(grid=(1, 1, 1), block=(64, 1, 1))

        return run

    def compile() -> None:
        tensor = make_fake_compact_tensor(cutlass.Float32, (64,))
        for degree in (1000, 1500):
            cute.compile(polynomial(degree), tensor, tensor, no_jit_engine=True)

    return compile


def flydsl() -> Callable[[], None]:
    """Two kernels for ``gfx942``."""
    global fx
    import flydsl.compiler as flyc
    import flydsl.expr as fx
    from flydsl._mlir.passmanager import PassManager

    before_each_run(PassManager, lambda text: "format=fatbin" in text, counted)

    def polynomial(degree: int) -> Any:
        @flyc.kernel
        def evaluate(source: fx.Tensor, target: fx.Tensor):  # type: ignore[no-untyped-def]
            thread = fx.thread_idx.x
            target[thread] = horner(source[thread], degree)

        @flyc.jit
        def run(source: fx.Tensor, target: fx.Tensor):  # type: ignore[no-untyped-def]
            evaluate(source, target).launch(grid=(1, 1, 1), block=(64, 1, 1))

        return run

    def horner(x: Any, degree: int) -> Any:
        found = x
        for each in range(degree):
            found = found * x + fx.Float32(float(each))
        return found

    def compile() -> None:
        x = torch.ones(64)
        for degree in (3000, 4000):
            polynomial(degree)(x, x)

    return compile


def cutile() -> Callable[[], None]:
    """Four products of matrices for ``sm_90``, by the size of their tiles."""
    global ct
    import cuda.tile as ct
    from cuda.tile import _compile, compilation

    native = _compile._CompilerBinary.run

    def run(binary: Any, args: list[str], *more: Any, **keywords: Any) -> None:
        if not Path(args[0]).name.startswith("probe"):
            counted()
        native(binary, args, *more, **keywords)

    _compile._CompilerBinary.run = run

    @ct.kernel
    def multiply(a, b, c, size: ct.Constant[int]):  # type: ignore[no-untyped-def]
        row, column = ct.bid(0), ct.bid(1)
        total = ct.full((size, size), 0, ct.float32)
        for each in range(ct.num_tiles(a, axis=1, shape=(size, size))):
            left = ct.load(a, index=(row, each), shape=(size, size))
            right = ct.load(b, index=(each, column), shape=(size, size))
            total = ct.mma(left, right, total)
        ct.store(c, index=(row, column), tile=total)

    def matrix(kind: Any) -> Any:
        return compilation.ArrayConstraint(
            dtype=kind, ndim=2, index_dtype=ct.int32, stride_lower_bound_incl=0, alias_groups=(), may_alias_internally=False
        )  # fmt: skip

    def compile() -> None:
        matrices = matrix(ct.float16), matrix(ct.float16), matrix(ct.float32)
        for size in (16, 32, 64, 128):
            signature = compilation.KernelSignature(
                [*matrices, compilation.ConstantConstraint(size)],
                calling_convention=compilation.CallingConvention.cutile_python_v1(),
            )
            compilation.export_kernel(multiply, [signature], io.BytesIO(), gpu_code="sm_90", output_format="cubin")

    return compile


def nvcc() -> Callable[[], None]:
    """nvcc itself, for a kernel with CUDA's headers, as DeepGEMM runs it: by ``kcoord cc`` in kcoord's runs."""
    place = Path(os.environ["HOME"])
    place.mkdir(parents=True, exist_ok=True)
    lines = ["#include <cuda_fp16.h>"]
    for each in range(16):
        body = f"for (int i = 0; i < 16; i++) x[i] = sinf(x[i] + {each}) + cosf(x[i] * {each});"
        lines.append(f'extern "C" __global__ void k{each}(float *x) {{\n#pragma unroll\n{body} }}')
    real = shutil.which("nvcc")
    counting = place.parent / "nvcc"
    part = counting.with_name(f"{os.getpid()}.sh")
    part.write_text(f'#!/bin/sh\ncase "$*" in *" -M") ;; *) echo >> "$0.$RANK" ;; esac\nexec {real} "$@"\n')
    part.chmod(0o755)
    part.replace(counting)
    calls = Path(f"{counting}.{os.environ['RANK']}")
    calls.unlink(missing_ok=True)
    is_ours = "OURS" in os.environ
    launcher = [sys.executable, "-c", "from kcoord.cli import main; main()", "cc", "--"] if is_ours else []

    def compile() -> None:
        global compiles
        source, cubin = place / "kernel.cu", place / "kernel.cubin"
        if cubin.exists() and not is_ours:
            return  # as DeepGEMM's own cache
        part = place / f"{os.getpid()}.cu"
        part.write_text("\n".join(lines))
        part.replace(source)
        line = [str(counting), str(source), "-cubin", "-arch=sm_90a", "-o", str(cubin)]
        subprocess.run([*launcher, *line], check=True)
        compiles = len(calls.read_text()) if calls.exists() else 0

    return compile


COMPILERS = {each.__name__: each for each in (extension, tvm_ffi, tilelang, cutedsl, flydsl, cutile, nvcc)}


def main() -> None:
    dist.init_process_group("gloo")
    compile = COMPILERS[sys.argv[1]]()
    dist.barrier()
    begun = time.perf_counter()
    compile()
    dist.barrier()
    wall = time.perf_counter() - begun
    total = torch.tensor([compiles])
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(json.dumps({"wall": wall, "compiles": int(total)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
