"""Helion: kernels in PyTorch's language, which are tuned for minutes. Triton compiles them."""

from kcoord.backends.compiler import Compiler

COMPILER = Compiler("helion", modules={"helion": "kcoord.backends.helion.hooks"}, packages={"helion": (1, 2)})
