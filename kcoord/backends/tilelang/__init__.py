"""TileLang: kernels by way of TVM."""

from kcoord.backends.compiler import Compiler

COMPILER = Compiler(
    "tilelang",
    "kcoord.backends.tilelang.adapter:backend",
    # after torch, which may install kcoord, and after all that is hooked
    modules={"tilelang.autotuner": "kcoord.backends.tilelang.hooks"},
    packages={"tilelang": (0, 1, 12)},
)
