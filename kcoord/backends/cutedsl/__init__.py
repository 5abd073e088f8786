"""CuTe DSL: CUTLASS in Python."""

from kcoord.backends.compiler import Compiler

COMPILER = Compiler(
    "cutedsl",
    "kcoord.backends.cutedsl.adapter:backend",
    # it imports no torch, which may install kcoord in the middle of an import
    modules={"cutlass.base_dsl.compiler": "kcoord.backends.cutedsl.hooks"},
    packages={"nvidia-cutlass-dsl": (4, 4)},
)
