"""FlyDSL: MLIR for AMD's GPUs."""

from kcoord.backends.compiler import Compiler

COMPILER = Compiler(
    "flydsl",
    "kcoord.backends.flydsl.adapter:backend",
    # after torch, which may install kcoord and which `flydsl` imports
    modules={"flydsl.compiler": "kcoord.backends.flydsl.hooks"},
    packages={"flydsl": (0, 2)},
)
