"""C++ and CUDA libraries that ninja builds while the job runs: torch's extensions, FlashInfer's and tvm_ffi's libraries."""

from kcoord.backends.compiler import Compiler

COMPILER = Compiler(
    "ninja",
    "kcoord.backends.ninja.adapter:backend",
    modules=dict.fromkeys(
        ("torch.utils.cpp_extension", "flashinfer.jit.core", "tvm_ffi.cpp.extension"), "kcoord.backends.ninja.hooks"
    ),
    packages={"torch": (2, 11)},
)
