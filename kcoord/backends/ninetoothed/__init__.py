"""NineToothed: Triton kernels from arrangements of tensors, and libraries of them."""

from kcoord.backends.compiler import Compiler

COMPILER = Compiler(
    "ninetoothed",
    "kcoord.backends.ninetoothed.adapter:backend",
    # after torch and Triton, which may install kcoord, and after all that is hooked
    modules={"ninetoothed.make": "kcoord.backends.ninetoothed.hooks"},
    packages={"ninetoothed": (0, 25), "triton": (3, 4)},
)
