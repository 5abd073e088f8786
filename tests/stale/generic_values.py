"""Rows of the generic API: values that a compile function reads. Its globals, closure, defaults and arguments."""

from __future__ import annotations

from tests.stale.row import Row

HEAD = """
import functools
from dataclasses import dataclass
from types import SimpleNamespace

from tests.stale.generic_ways import compile_once
"""


def reads(
    what: str, setup: str, expression: str, edit: tuple[str, str], change: str, undo: str, names: str, **more: object
) -> Row:
    """A compile function whose output is `expression`, evaluated in a module that `setup` prepares."""
    build = f'\n@compile_once()\ndef build(x, *, staging):\n    (staging / "kernel").write_text(f"{{{expression}}}")\n'
    return Row(what, HEAD + setup + build, "build(3)", edit, change, undo, names, **more)  # type: ignore[arg-type]


def makes(what: str, maker: str, made: str, edit: tuple[str, str], change: str, undo: str, names: str) -> Row:
    """The same for a compile function that `make` returns, with whatever else is needed to change its closure."""
    return Row(what, HEAD + maker + f"\n{made}\n", "build(3)", edit, change, undo, names)


_CONSTS = {"consts.py": "TILE = 1\nSIZES = [1, 2]\n"}
_CLOSURE = """
def make(n):
    @compile_once()
    def build(x, *, staging):
        (staging / "kernel").write_text(f"{EXPRESSION}")

    def set_n(value):
        nonlocal n
        n = value

    return build, set_n
"""

GLOBALS = [
    reads("a global scalar", "N = 1", "x + N", ("N = 1", "N = 2"), "N = 2", "N = 1", "N"),
    reads("the type of a global scalar", "N = 1", "x + N", ("N = 1", "N = 1.0"), "N = 1.0", "N = 1", "N"),
    reads("a global list mutated in place", "SIZES = [1, 2]", "SIZES",
          ("[1, 2]", "[1, 2, 3]"), "SIZES.append(3)", "SIZES.pop()", "SIZES"),
    reads("a list in a global dict mutated in place", "TABLE = {'sizes': [1, 2]}", "TABLE['sizes'][-1]",
          ("[1, 2]", "[1, 3]"), "TABLE['sizes'][1] = 3", "TABLE['sizes'][1] = 2", "TABLE"),
    reads("an attribute of a global object", "class Config: pass\nconfig = Config()\nconfig.tile = 1", "config.tile",
          ("tile = 1", "tile = 2"), "config.tile = 2", "config.tile = 1", "tile"),
    reads("an attribute of an attribute of a global object", "class Config: pass\n"
          "config = Config()\nconfig.inner = Config()\nconfig.inner.tile = 1", "config.inner.tile",
          ("tile = 1", "tile = 2"), "config.inner.tile = 2", "config.inner.tile = 1", "tile"),
    reads("a list in an attribute of a global object", "class Config: pass\nconfig = Config()\nconfig.sizes = [1, 2]",
          "config.sizes[-1]", ("[1, 2]", "[1, 3]"), "config.sizes[1] = 3", "config.sizes[1] = 2", "sizes"),
    reads("an attribute of a global namespace", "config = SimpleNamespace(tile=1)", "config.tile",
          ("tile=1", "tile=2"), "config.tile = 2", "config.tile = 1", "tile|config"),
    reads("an attribute of a global class", "class Config:\n    tile = 1", "Config.tile",
          ("tile = 1", "tile = 2"), "Config.tile = 2", "Config.tile = 1", "tile"),
    reads("an attribute that a global class inherits", "class Base:\n    tile = 1\n\nclass Config(Base): pass",
          "Config.tile", ("tile = 1", "tile = 2"), "Base.tile = 2", "Base.tile = 1", "tile"),
    reads("a module's constant", "from . import consts", "consts.TILE",
          ("TILE = 1", "TILE = 2"), "consts.TILE = 2", "consts.TILE = 1", "TILE", files=_CONSTS),
    reads("a module's constant read through its package", "from . import pkg", "pkg.mod.TILE", ("TILE = 1", "TILE = 2"),
          "pkg.mod.TILE = 2", "pkg.mod.TILE = 1", "TILE",
          files={"pkg/__init__.py": "from . import mod\n", "pkg/mod.py": "TILE = 1\n"}),
    reads("a module's list mutated in place", "from . import consts", "consts.SIZES[-1]", ("[1, 2]", "[1, 3]"),
          "consts.SIZES[1] = 3", "consts.SIZES[1] = 2", "SIZES", files=_CONSTS),
    reads("a constant imported by name", "from .consts import TILE", "TILE",
          ("TILE = 1", "TILE = 2"), "TILE = 2", "TILE = 1", "TILE", files=_CONSTS),
    reads("which module a global names", "from . import consts\nfrom . import other\nchosen = consts", "chosen.TILE",
          ("chosen = consts", "chosen = other"), "chosen = other", "chosen = consts", "chosen",
          files={"consts.py": "TILE = 1\n", "other.py": "TILE = 3\n"}),
    reads("a module's constant read through a local name", "from . import consts\ndef helper(m): return m.TILE",
          "helper(consts)", ("TILE = 1", "TILE = 2"), "consts.TILE = 2", "consts.TILE = 1", "TILE", files=_CONSTS),
    reads("a function of a module that is chosen as a value", "from . import consts\noriginal = consts.size",
          "(consts if x else None).size()", ("return 1", "return 2"), "consts.size = lambda: 2", "consts.size = original",
          "size", files={"consts.py": "def size(): return 1\n"}),
    reads("a method of a dataclass's object in a list", "@dataclass\nclass Config:\n    tile: int = 1\n"
          "    def size(self): return self.tile\nconfigs = [Config()]\noriginal = Config.size", "[c.size() for c in configs]",
          ("return self.tile", "return -self.tile"), "Config.size = lambda self: 5", "Config.size = original", "size"),
    reads("a property of an enum's member in a dict", "import enum\nclass Kind(enum.Enum):\n    FAST = 1\n    @property\n"
          "    def flag(self): return '-O1'\nkinds = {'k': Kind.FAST}\noriginal = vars(Kind)['flag']", "kinds['k'].flag",
          ("-O1", "-O2"), "Kind.flag = property(lambda self: '-O3')", "Kind.flag = original", "flag"),
    reads("a method of a named tuple in a list", "from typing import NamedTuple\nclass Shape(NamedTuple):\n    m: int\n"
          "    def size(self): return self.m\nshapes = [Shape(3)]\noriginal = Shape.size", "[s.size() for s in shapes]",
          ("return self.m", "return -self.m"), "Shape.size = lambda self: 5", "Shape.size = original", "size"),
    reads("the content of a global array", "import numpy\ntable = numpy.array([1, 2])", "table.tolist()",
          ("[1, 2]", "[1, 3]"), "table[1] = 3", "table[1] = 2", "table"),
    reads("what an attribute of a function holds", "def helper(x): return x\nhelper.cfg = [1]", "helper.cfg",
          ("[1]", "[1, 5]"), "helper.cfg.append(5)", "helper.cfg.pop()", "cfg"),
    reads("which builtin a global names", "choose = min", "choose(x, 2)",
          ("= min", "= max"), "choose = max", "choose = min", "choose"),
    reads("a builtin that is exchanged", "import builtins\noriginal = builtins.oct", "oct(x)",
          ("= builtins.oct", "= builtins.oct\noct = lambda x: 9"), "builtins.oct = lambda x: 2", "builtins.oct = original", ""),
    reads("the class of a global object", "class Config: tile = 1\nclass Other: tile = 2\nconfig = Config()", "config.tile",
          ("= Config()", "= Other()"), "config.__class__ = Other", "config.__class__ = Config", "config"),
    reads("the base of a global class", "class Base: tile = 1\nclass Other: tile = 2\nclass Config(Base): pass", "Config.tile",
          ("Config(Base)", "Config(Other)"), "Config.__bases__ = (Other,)", "Config.__bases__ = (Base,)", "tile"),
    reads("what a descriptor makes of what an object keeps under its name", """
FACTOR = 2
class Scaled:
    def __set_name__(self, owner, name): self.name = name
    def __get__(self, value, owner): return value.__dict__[self.name] * FACTOR
    def __set__(self, value, held): value.__dict__[self.name] = held
class Config:
    tile = Scaled()
config = Config()
config.tile = 500
""", "config.tile", ("FACTOR = 2", "FACTOR = 3"), "FACTOR = 3", "FACTOR = 2", "FACTOR"),
    reads("an attribute of a metaclass", "class Meta(type):\n    tile = 1\nclass Config(metaclass=Meta): pass", "Config.tile",
          ("tile = 1", "tile = 2"), "Meta.tile = 2", "Meta.tile = 1", "tile"),
    reads("a global of a comprehension", "N = 1", "[n + N for n in (1, 2)]", ("N = 1", "N = 2"), "N = 2", "N = 1", "N"),
    Row("a constant of a module that the function itself imports", HEAD + '''
@compile_once()
def build(x, *, staging):
    from . import consts

    (staging / "kernel").write_text(f"{consts.TILE}")
''', "build(3)", ("TILE = 1", "TILE = 2"), "from . import consts\nconsts.TILE = 2", "consts.TILE = 1", "TILE", _CONSTS),
    Row("a constant that the function itself imports by name", HEAD + '''
@compile_once()
def build(x, *, staging):
    from .consts import TILE

    (staging / "kernel").write_text(f"{TILE}")
''', "build(3)", ("TILE = 1", "TILE = 2"), "from . import consts\nconsts.TILE = 2", "consts.TILE = 1", "TILE", _CONSTS),
]  # fmt: skip

CLOSURES = [
    makes("a closure scalar", _CLOSURE.replace("EXPRESSION", "x + n"), "build, set_n = make(1)",
          ("make(1)", "make(2)"), "set_n(2)", "set_n(1)", "n"),
    makes("a closure list mutated in place", _CLOSURE.replace("EXPRESSION", "n"),
          "sizes = [1, 2]\nbuild, set_n = make(sizes)",
          ("[1, 2]", "[1, 2, 3]"), "sizes.append(3)", "sizes.pop()", "n"),
    makes("an attribute of a closure object", _CLOSURE.replace("EXPRESSION", "n.tile"),
          "class Config: pass\nconfig = Config()\nconfig.tile = 1\nbuild, set_n = make(config)",
          ("tile = 1", "tile = 2"), "config.tile = 2", "config.tile = 1", "tile"),
    makes("a closure function", _CLOSURE.replace("EXPRESSION", "n(x)"),
          "def one(x): return x + 1\ndef two(x): return x + 2\nbuild, set_n = make(one)",
          ("x + 1", "x + 4"), "set_n(two)", "set_n(one)", "n"),
    makes("a global of a closure function", _CLOSURE.replace("EXPRESSION", "n(x)"),
          "M = 1\ndef one(x): return x + M\nbuild, set_n = make(one)", ("M = 1", "M = 2"), "M = 2", "M = 1", "M"),
    makes("a closure of a closure function", _CLOSURE.replace("EXPRESSION", "n(x)"),
          "def adder(m):\n    return lambda x: x + m\nbuild, set_n = make(adder(1))",
          ("adder(1)", "adder(2)"), "set_n(adder(2))", "set_n(adder(1))", "n|m"),
]  # fmt: skip

_ADD = "def add(x, y, z=0): return x + 10 * y + 100 * z\n"

PARTIALS = [
    reads("a partial argument", _ADD + "step = functools.partial(add, 1)", "step(x)",
          ("add, 1", "add, 2"), "step = functools.partial(add, 2)", "step = functools.partial(add, 1)", "step|partial"),
    reads("a partial keyword argument", _ADD + "step = functools.partial(add, y=1)", "step(x)",
          ("y=1", "y=2"), "step.keywords['y'] = 2", "step.keywords['y'] = 1", "step|partial"),
    reads("an argument of a nested partial", _ADD + "step = functools.partial(functools.partial(add, 1), z=3)", "step(x)",
          ("add, 1", "add, 2"), "step = functools.partial(functools.partial(add, 2), z=3)",
          "step = functools.partial(functools.partial(add, 1), z=3)", "step|partial"),
    reads("a list in a partial mutated in place",
          "def total(items, x): return sum(items) + x\nitems = [1]\nstep = functools.partial(total, items)", "step(x)",
          ("[1]", "[1, 5]"), "items.append(5)", "items.pop()", "step|partial"),
    reads("the function in a partial", _ADD + "def sub(x, y): return x - y\nstep = functools.partial(add, 1)", "step(x)",
          ("x + 10", "x - 10"), "step = functools.partial(sub, 1)", "step = functools.partial(add, 1)", "step|partial"),
    reads("a global of the function in a partial",
          "M = 1\ndef add(x, y): return x + y + M\nstep = functools.partial(functools.partial(add), 1)", "step(x)",
          ("M = 1", "M = 2"), "M = 2", "M = 1", "M"),
]  # fmt: skip

DEFAULTS = [
    Row("a default argument", HEAD + '''
@compile_once()
def build(x, n=1, *, staging):
    (staging / "kernel").write_text(f"{x + n}")
''', "build(3)", ("n=1", "n=2"), "build.__wrapped__.__defaults__ = (2,)", "build.__wrapped__.__defaults__ = (1,)", "defaults?"),
    reads("a default argument of a helper", "def helper(x, n=1): return x + n", "helper(x)", ("n=1", "n=2"),
          "helper.__defaults__ = (2,)", "helper.__defaults__ = (1,)", "helper"),
    reads("a keyword default of a helper", "def helper(x, *, n=1): return x + n", "helper(x)", ("n=1", "n=2"),
          "helper.__kwdefaults__['n'] = 2", "helper.__kwdefaults__['n'] = 1", "helper"),
    reads("a default list mutated in place", "SIZES = [1]\ndef helper(x, sizes=SIZES): return x + sum(sizes)", "helper(x)",
          ("[1]", "[1, 5]"), "SIZES.append(5)", "SIZES.pop()", "helper"),
    reads("a default argument computed at import", "M = 1\ndef helper(x, n=M): return x + n", "helper(x)",
          ("M = 1", "M = 2"), "helper.__defaults__ = (2,)", "helper.__defaults__ = (1,)", "helper"),
]  # fmt: skip

_ARGUMENT = """
@compile_once()
def build(x, *, staging):
    (staging / "kernel").write_text(f"{x!r}")

argument = 1
"""

ARGUMENTS = [
    Row("a method of a dataclass that is an argument", HEAD + '''
@dataclass
class Config:
    tile: int = 1
    def size(self): return self.tile

original = Config.size

@compile_once()
def build(config, *, staging):
    (staging / "kernel").write_text(f"{config.size()}")
''', "build(Config())", ("return self.tile", "return -self.tile"), "Config.size = lambda self: 5", "Config.size = original",
        "size"),
    Row("an argument of another type", HEAD + _ARGUMENT, "build(argument)", ("= 1", "= 1.0"), "argument = 1.0", "argument = 1"),
    Row("a boolean argument", HEAD + _ARGUMENT, "build(argument)", ("= 1", "= True"), "argument = True", "argument = 1"),
]  # fmt: skip

ROWS = [*GLOBALS, *CLOSURES, *PARTIALS, *DEFAULTS, *ARGUMENTS]
