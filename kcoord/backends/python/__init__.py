"""Compile functions of users: `kcoord.compile_once`. There is nothing to hook."""

from kcoord.backends.compiler import Compiler

COMPILER = Compiler("python", "kcoord.backends.python.compile_once:backend")
