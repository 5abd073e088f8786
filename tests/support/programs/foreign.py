"""Compiles a kernel for a GPU that need not be there, and imports neither torch nor kcoord."""

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def kernel(out, NUMBER: tl.constexpr):
    tl.store(out, NUMBER)


source = ASTSource(kernel, {"out": "*i32", "NUMBER": "constexpr"}, {(1,): 7}, {})
assert "cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
