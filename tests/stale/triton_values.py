"""Rows of Triton: values that a kernel reads. Its globals, closure, defaults and constants."""

from __future__ import annotations

from tests.stale.row import Row

HEAD = """
import functools
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
"""

SAME, NEW = frozenset({"same"}), frozenset({"new"})
Edit = tuple[str, str] | None


def stores(
    what: str, setup: str, expression: str, edit: Edit, change: str, undo: str, names: str, **more: object
) -> Row:
    """A kernel that stores `expression`, in a module that `setup` prepares."""
    kernel = f"\n@triton.jit\ndef kernel(x):\n    tl.store(x, {expression})  # {{what}}\n"
    return Row(what, HEAD + setup + kernel, "launch(kernel)", edit, change, undo, names, **more)  # type: ignore[arg-type]


_CONSTS = {"consts.py": "import triton.language as tl\nTILE = 1\nLIMIT = tl.constexpr(1)\n"}

GLOBALS = [
    stores("a global scalar", "N = 1", "N", ("N = 1", "N = 2"), "N = 2", "N = 1", "N", stock=NEW),
    stores("the type of a global scalar", "N = 1", "tl.load(x) / N", ("N = 1", "N = 1.5"), "N = 1.5", "N = 1", "N", stock=NEW),
    stores("a global constexpr", "N = tl.constexpr(1)", "N",
           ("constexpr(1)", "constexpr(2)"), "N = tl.constexpr(2)", "N = tl.constexpr(1)", "N"),
    stores("a global list mutated in place", "SIZES = [1, 2]", "SIZES[1]",
           ("[1, 2]", "[1, 3]"), "SIZES[1] = 3", "SIZES[1] = 2", "SIZES", stock=NEW),
    stores("an attribute of a global object", "@dataclass\nclass Config:\n    tile: int\nconfig = Config(1)", "config.tile",
           ("Config(1)", "Config(2)"), "config.tile = 2", "config.tile = 1", "config", stock=NEW),
    stores("a field of a global named tuple", "class Shape(NamedTuple):\n    m: int\nshape = Shape(1)", "shape.m",
           ("Shape(1)", "Shape(2)"), "shape = Shape(2)", "shape = Shape(1)", "shape", stock=NEW),
    stores("an attribute of a global class", "class Config:\n    tile = 1", "Config.tile",
           ("tile = 1", "tile = 2"), "Config.tile = 2", "Config.tile = 1", "tile", stock=SAME | NEW),
    stores("an attribute of a metaclass", "class Meta(type):\n    tile = 1\nclass Config(metaclass=Meta): pass", "Config.tile",
           ("tile = 1", "tile = 2"), "Meta.tile = 2", "Meta.tile = 1", "tile", stock=SAME | NEW),
    stores("a global dtype", "WIDE = tl.int16", "tl.load(x).to(WIDE)",
           ("= tl.int16", "= tl.int8"), "WIDE = tl.int8", "WIDE = tl.int16", "WIDE", stock=NEW),
    stores("which builtin a global names", "choose = tl.maximum", "choose(tl.load(x), 3)",
           ("tl.maximum", "tl.minimum"), "choose = tl.minimum", "choose = tl.maximum", "choose", stock=SAME | NEW),
    stores("a global that makes the kernel take another branch", "FAST = False", "1 if FAST else tl.load(x)",
           ("FAST = False", "FAST = True"), "FAST = True", "FAST = False", "FAST", stock=NEW),
]  # fmt: skip

_MAKE = """
def make(n):
    @triton.jit
    def kernel(x):
        tl.store(x, EXPRESSION)  # {what}

    def set_n(value):
        nonlocal n
        n = value

    return kernel, set_n
"""


def closes(
    what: str, expression: str, made: str, edit: tuple[str, str], change: str, undo: str, stock: frozenset[str]
) -> Row:
    """A kernel that stores `expression`, which reads the closure variable ``n``."""
    maker = HEAD + _MAKE.replace("EXPRESSION", expression)
    return Row(what, f"{maker}\n{made}\n", "launch(kernel)", edit, change, undo, "n", stock=stock)


CLOSURES = [
    closes("a closure list mutated in place", "n[1]", "sizes = [1, 2]\nkernel, set_n = make(sizes)",
           ("[1, 2]", "[1, 3]"), "sizes[1] = 3", "sizes[1] = 2", NEW),
    closes("a closure function", "n(tl.load(x))", "@triton.jit\ndef one(v): return v + 1\n"
           "@triton.jit\ndef two(v): return v + 2\nkernel, set_n = make(one)",
           ("v + 1", "v + 4"), "set_n(two)", "set_n(one)", SAME),
]  # fmt: skip

DEFAULTS = [
]  # fmt: skip

_TYPED = HEAD + "argument = 2\n@triton.jit\ndef kernel(x, N: tl.constexpr):\n    tl.store(x, EXPRESSION)  # {what}\n"

ARGUMENTS = [
    Row("a constant of the launch", _TYPED.replace("EXPRESSION", "N"), "launch(kernel, N=argument)",
        ("= 2", "= 3"), "argument = 3", "argument = 2"),
    Row("a constant of another type", _TYPED.replace("EXPRESSION", "(tl.load(x) + N).to(tl.int32)"),
        "launch(kernel, N=argument)", ("= 2", "= 2.0"),
        # Triton's memory of launches takes 2 and 2.0 for one constant (from 3.5 on), which kcoord does not change
        "argument = 2.0\nkernel.device_caches.clear()", "argument = 2\nkernel.device_caches.clear()"),
]  # fmt: skip

_FIELD = """
from dataclasses import field

@dataclass(frozen=True)
class Config:
    tile: int = field(repr=False)

config = Config(1)

@triton.jit
def kernel(x, C: tl.constexpr):
    tl.store(x, C.tile)  # {what}
"""
_OBJECT = """
class Config:
    def __repr__(self): return "config"

config = Config()
config.inner = Config()
config.inner.tile = 1

@triton.jit
def kernel(x, C: tl.constexpr):
    tl.store(x, C.inner.tile)  # {what}
"""
_SLOTS = """
class Slotted:
    __slots__ = ("tile",)

    def __init__(self, tile):
        self.tile = tile

    def __repr__(self): return "slotted"

config = Slotted(1)

@triton.jit
def kernel(x, C: tl.constexpr):
    tl.store(x, C.tile)  # {what}
"""
_ROW_OF_TEXTS = """
one, other = "a", "b-c"

@triton.jit
def kernel(x, A: tl.constexpr, B: tl.constexpr):
    if A == "a":
        tl.store(x, 1)  # {what}
    else:
        tl.store(x, 2)
"""
_FORGET = "\nkernel.device_caches.clear()"  # Triton's memory of launches tells constants apart by their texts

ARGUMENTS += [
    Row("two texts that read the same in a row", HEAD + _ROW_OF_TEXTS, "launch(kernel, A=one, B=other)",
        ('"a", "b-c"', '"a-b", "c"'),
        'one, other = "a-b", "c"', 'one, other = "a", "b-c"', stock=SAME | NEW),
    Row("a field that an object's text does not say", HEAD + _FIELD, "launch(kernel, C=config)", ("= Config(1)", "= Config(2)"),
        "config = Config(2)" + _FORGET, "config = Config(1)" + _FORGET, stock=SAME | NEW),
    Row("an attribute of an object in one of the launch", HEAD + _OBJECT, "launch(kernel, C=config)", ("tile = 1", "tile = 2"),
        "config.inner.tile = 2", "config.inner.tile = 1", stock=SAME | NEW),
    Row("a slot of an object of the launch", HEAD + _SLOTS, "launch(kernel, C=config)", ("= Slotted(1)", "= Slotted(2)"),
        "config.tile = 2", "config.tile = 1", stock=SAME | NEW),
]  # fmt: skip

ROWS = [*GLOBALS, *CLOSURES, *DEFAULTS, *ARGUMENTS]
