"""cuTile: tiles in Python, for NVIDIA's GPUs."""

from kcoord.backends.compiler import Compiler

COMPILER = Compiler(
    "cutile",
    "kcoord.backends.cutile.adapter:backend",
    modules={"cuda.tile._compile": "kcoord.backends.cutile.hooks"},
    packages={"cuda-tile": (1, 3)},
)
