"""A rank that compiles with COMPILER for its GPU, and uses the kernel. ``gpu_compilers.py COMPILER``, run with torchrun."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

CUDA = """
#include <c10/cuda/CUDAStream.h>
__global__ void twice(float *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2;
}
void doubled(torch::Tensor x) {
  twice<<<(x.numel() + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(x.data_ptr<float>(), x.numel());
}
"""
compiles = 0
T: Any = None
cute: Any = None


def count(place: Any, name: str) -> None:
    native = getattr(place, name)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        global compiles
        compiles += 1
        return native(*arguments, **keywords)

    setattr(place, name, counted)


def extension() -> dict[str, Any]:
    """`torch.utils.cpp_extension`, with a CUDA kernel."""
    from torch.utils import cpp_extension

    count(cpp_extension, "_run_ninja_build")
    declared = "void doubled(torch::Tensor x);"
    module = cpp_extension.load_inline("doubling", cpp_sources=[declared], cuda_sources=[CUDA], functions=["doubled"])
    x = torch.arange(1000.0, device="cuda")
    module.doubled(x)
    return {"right": torch.equal(x.cpu(), 2 * torch.arange(1000.0))}


def tilelang() -> dict[str, Any]:
    """A GEMM whose block sizes are tuned, by its measured time."""
    global T  # a function that is tuned may have no module in its closure
    import tilelang as compiler
    import tilelang.language as T
    from tilelang.jit import JITKernel

    count(JITKernel, "_compile_and_create_adapter")

    @compiler.autotune(configs=[{"block": 64}, {"block": 128}], warmup=3, rep=10)
    @compiler.jit(out_idx=[2])
    def gemm(size: int, block: int = 64) -> Any:
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

    kernel = gemm(1024)
    a, b = (torch.randn(1024, 1024, device="cuda", dtype=torch.float16) for _ in range(2))
    return {"right": torch.allclose(kernel(a, b), a @ b, atol=0.3, rtol=0.02), "choice": kernel.config}


def cutedsl() -> dict[str, Any]:
    """A kernel of ``cute.compile``, that a rank launches on what it was not compiled with."""
    global cute
    import types

    from cutlass import cute
    from cutlass._mlir import passmanager
    from cutlass.cute.runtime import from_dlpack

    passes = types.SimpleNamespace(parse=passmanager.PassManager.parse)
    count(passes, "parse")
    passmanager.PassManager = passes

    @cute.kernel
    def scale(source: cute.Tensor, target: cute.Tensor):  # type: ignore[no-untyped-def]
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        at = block * 64 + thread
        target[at] = source[at] * 3.0

    @cute.jit
    def run(source: cute.Tensor, target: cute.Tensor):  # type: ignore[no-untyped-def]
        scale(source, target).launch(grid=(cute.size(source) // 64, 1, 1), block=(64, 1, 1))

    def tensors() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.rand(1024, device="cuda")
        return x, torch.zeros_like(x)

    kernel = cute.compile(run, *map(from_dlpack, tensors()))
    x, y = tensors()
    kernel(from_dlpack(x), from_dlpack(y))
    return {"right": torch.equal(y, 3 * x)}


def arranged(source: Any, target: Any) -> Any:
    return source.tile((256,)), target.tile((256,))


def doubled(source, target):  # type: ignore[no-untyped-def] # NineToothed would write the types into its source
    target = source * 2  # noqa: F841


def ninetoothed() -> dict[str, Any]:
    """A kernel for Triton. Libraries of NineToothed 0.26 are refused by nvcc with Triton 3.6, as without kcoord."""
    import ninetoothed as compiler
    from triton.compiler import ASTSource

    count(ASTSource, "make_ir")
    tensors = [compiler.Tensor(1) for _ in range(2)]
    kernel = compiler.make(arranged, doubled, tensors, num_warps=4, num_stages=2)
    x = torch.rand(1000, device="cuda")
    y = torch.zeros_like(x)
    kernel(x, y)
    return {"right": torch.equal(y, 2 * x)}


def main() -> None:
    dist.init_process_group("gloo")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    found = globals()[sys.argv[1]]()
    sys.stdout.write(json.dumps({**found, "compiles": compiles}) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
