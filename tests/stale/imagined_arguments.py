"""Imagined rows: what a compile function is called with."""

from __future__ import annotations

from dataclasses import replace

from tests.stale.imagined_row import reads
from tests.stale.row import Row


def given(what: str, setup: str, expression: str, edit: tuple[str, str], change: str, undo: str, **more: object) -> Row:
    """A compile function that is called with the global ``given``, which its code does not read."""
    return replace(reads(what, setup, expression, edit, change, undo, **more), call="build(given)")


def other(what: str, first: str, second: str, expression: str = "repr(x)", imports: str = "", **more: object) -> Row:
    """An argument that is `first`, and then `second`."""
    edit = (f"given = {first}", f"given = {second}")
    return given(what, f"{imports}\ngiven = {first}", expression, edit, f"given = {second}", f"given = {first}", **more)


PLAIN = [
    other("a negative zero that is given", "0.0", "-0.0"),
    other("a true in a list that is given", "[1, 1]", "[1, True]"),
    other("the order of a dict that is given", "{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}"),
    other("a text that is given for none", "None", "'None'"),
    other("a class that is given", "int", "float"),
    other("a builtin that is given", "min", "max", "x(1, 2)"),
    other("a set that is given", "{1, 2}", "{1, 3}"),
    other("a frozen set that is given for a set", "{1}", "frozenset({1})"),
    other("a range that is given", "range(3)", "range(4)", refuses=True),
    other("a moment that is given", "datetime(2026, 1, 1)", "datetime(2026, 1, 2)", imports="from datetime import datetime",
          refuses=True),
    other("a pattern that is given", "re.compile('a')", "re.compile('b')", imports="import re", refuses=True),
    other("an array's type that is given", "numpy.dtype('f4')", "numpy.dtype('f8')", imports="import numpy", refuses=True),
    other("a combination of flags that is given", "Flags.A | Flags.B", "Flags.A | Flags.C",
          imports="import enum\nclass Flags(enum.Flag):\n    A = 1\n    B = 2\n    C = 4"),
]  # fmt: skip

OBJECTS = [
    given("a closure of a function that is given", "def made(k): return lambda n: n + k\ngiven = made(1)", "x(1)",
          ("made(1)", "made(2)"), "kept, given = given, made(3)", "given = kept", refuses=True),
    given("an argument of a partial that is given", "def add(a, b): return a + b\ngiven = functools.partial(add, 1)", "x(1)",
          ("(add, 1)", "(add, 2)"), "given = functools.partial(add, 2)", "given = functools.partial(add, 1)", refuses=True),
    given("a bound method that is given", "class Config:\n    k = 1\n    def size(self, n): return n + self.k\n"
          "given = Config().size", "x(1)", ("k = 1", "k = 2"), "Config.k = 2", "Config.k = 1", refuses=True),
    given("a method of a class that is given", "class given:\n    def size(self): return 1\nkept = given.size", "x().size()",
          ("return 1", "return 2"), "given.size = lambda self: 3", "given.size = kept", refuses=True),
    given("what a dataclass in a list that is given inherits", "class Base:\n    def size(self): return 1\nkept = Base.size\n"
          "@dataclass\nclass Config(Base):\n    tile: int = 1\ngiven = [Config()]", "x[0].size()", ("return 1", "return 2"),
          "Base.size = lambda self: 3", "Base.size = kept"),
    given("a method of an enum's member that is given", "import enum\nclass Kind(enum.Enum):\n    A = 1\n"
          "    def flag(self): return '-O1'\nkept = Kind.flag\ngiven = Kind.A", "x.flag()", ("-O1", "-O2"),
          "Kind.flag = lambda self: '-O3'", "Kind.flag = kept"),
    given("a method of a named tuple that is given", "from typing import NamedTuple\nclass Shape(NamedTuple):\n    m: int = 1\n"
          "    def size(self): return self.m + 1\nkept = Shape.size\ngiven = Shape()", "x.size()", ("self.m + 1", "self.m + 2"),
          "Shape.size = lambda self: 0", "Shape.size = kept"),
    given("a module that is given", "from . import consts as given", "x.TILE", ("TILE = 1", "TILE = 2"), "given.TILE = 2",
          "given.TILE = 1", files={"consts.py": "TILE = 1\n"}, refuses=True),
    given("what a namespace that is given holds", "given = SimpleNamespace(tile=[1])", "x.tile", ("[1]", "[2]"),
          "given.tile[0] = 2", "given.tile[0] = 1", refuses=True),
    given("an object that signs itself", "class Config:\n    def __init__(self, n): self.n = n\n"
          "    def __cache_signature__(self): return (self.n,)\ngiven = Config(1)", "x.n", ("Config(1)", "Config(2)"),
          "given.n = 2", "given.n = 1"),
    given("a method of an object that signs itself", "class Config:\n    def __cache_signature__(self): return ()\n"
          "    def size(self): return 1\nkept = Config.size\ngiven = Config()", "x.size()", ("return 1", "return 2"),
          "Config.size = lambda self: 3", "Config.size = kept"),
    given("which of two lists in a list that is given are one", "A = [1]\nB = [1]\ngiven = [A, A]", "x[0] is x[1]",
          ("[A, A]", "[A, B]"), "given[1] = B", "given[1] = A"),
]  # fmt: skip

ROWS = [*PLAIN, *OBJECTS]
