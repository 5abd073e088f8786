"""Rows of the generic API: code that a compile function calls. Helpers, near and far, methods, and its own name."""

from __future__ import annotations

from tests.stale.generic_values import HEAD, reads
from tests.stale.row import Row

_TWO = "def helper(x): return x + 1\ndef other(x): return x + 2\n"
_FAR = {"far/__init__.py": "", "far/away.py": "N = 1\ndef helper(x): return x + N\ndef other(x): return x + 2\n"}
_SWAP = ("helper = other", "helper = original", "helper")
_FAR_SWAP = ("away.helper = away.other", "away.helper = original", "helper")

HELPERS = [
    reads("a helper in the same file", _TWO + "original = helper", "helper(x)", ("x + 1", "x + 4"), *_SWAP),
    reads("a helper of a helper", _TWO + "original = helper\ndef middle(x): return helper(x)", "middle(x)",
          ("x + 1", "x + 4"), *_SWAP),
    reads("a helper in another directory", "from .far.away import helper, other\noriginal = helper", "helper(x)",
          ("x + N", "x - N"), *_SWAP, files=_FAR),
    reads("a helper in another directory called through its module", "from .far import away\noriginal = away.helper",
          "away.helper(x)", ("x + N", "x - N"), *_FAR_SWAP, files=_FAR),
    reads("a helper called through its package", "from . import far\nfrom .far import away\noriginal = away.helper",
          "far.away.helper(x)", ("x + N", "x - N"), *_FAR_SWAP, files=_FAR),
    reads("a global of a helper in another directory", "from .far import away", "away.helper(x)",
          ("N = 1", "N = 2"), "away.N = 2", "away.N = 1", "N", files=_FAR),
    reads("a helper's module that is edited and reloaded", "import importlib\nfrom .far import away", "away.helper(x)",
          ("x + N", "x - N"), "importlib.reload(away)", "importlib.reload(away)", "away", files=_FAR, edits_live=True),
    reads("a module's constant that only a helper reads", "from . import far\nfrom .far import away\n"
          "def helper(x): return x + far.away.N", "helper(x)", ("N = 1", "N = 2"), "away.N = 2", "away.N = 1", "N", files=_FAR),
    reads("the code of a helper replaced in place", _TWO + "original = helper.__code__", "helper(x)",
          ("x + 1", "x + 4"), "helper.__code__ = other.__code__", "helper.__code__ = original", "helper"),
    reads("a lambda", "helper = lambda x: x + 1", "helper(x)",
          ("x + 1", "x + 4"), "original, helper = helper, lambda x: x + 2", "helper = original", "helper|<lambda>"),
    reads("a closure of a helper", "def adder(n):\n    def helper(x): return x + n\n    return helper\nhelper = adder(1)",
          "helper(x)", ("adder(1)", "adder(2)"), "helper.__closure__[0].cell_contents = 2",
          "helper.__closure__[0].cell_contents = 1", "n"),
    reads("a helper in a global dict", _TWO + "TABLE = {'step': helper}", "TABLE['step'](x)",
          ("x + 1", "x + 4"), "TABLE['step'] = other", "TABLE['step'] = helper", "TABLE"),
    reads("an argument of a helper's decorator", """
def times(k):
    def decorate(function):
        @functools.wraps(function)
        def call(x): return k * function(x)
        return call
    return decorate

@times(2)
def helper(x): return x
original = helper
""", "helper(x)", ("times(2)", "times(3)"), "helper = times(3)(helper.__wrapped__)", "helper = original", "helper"),
    reads("what an object that decorates holds", """
class Times:
    def __init__(self, function, k):
        functools.update_wrapper(self, function)
        self.function, self.k = function, k
    def __call__(self, x): return self.k * self.function(x)

def helper(x): return x
helper = Times(helper, 2)
""", "helper(x)", ("helper, 2", "helper, 3"), "helper.k = 3", "helper.k = 2", "k"),
    Row("a helper that the function itself imports", HEAD + '''
@compile_once()
def build(x, *, staging):
    from .far.away import helper

    (staging / "kernel").write_text(f"{helper(x)}")
''', "build(3)", ("x + N", "x - N"), "from .far import away\noriginal = away.helper\naway.helper = away.other",
        "away.helper = original", "helper", _FAR),
]  # fmt: skip

_KERNELS = """
N = 1
class Config:
    def __init__(self): pass
    def tile(self): return 7
def helper(x): return x + N
def other(x): return x + 2
"""
_NAMED_AS_PYTHONS = """
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import wave
sys.path.pop(0)
original = wave.helper
"""
_BY_PATH = """
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

spec = spec_from_file_location("click", Path(__file__).with_name("kernels.py"))
kernels = module_from_spec(spec)
spec.loader.exec_module(kernels)
helper = original = kernels.helper
"""
_INSTALLED = """
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("site-packages")))
from decorators_of_others import twice
sys.path.pop(0)

def inner(x): return x + 1
def other(x): return x
helper = original = twice(inner)
"""
_TWICE = "def twice(function):\n    def call(x): return 2 * function(x)\n    return call\n"
_EITHER = """
@compile_once()
def build(x, *, staging):
    try:
        from .fast import helper
    except ImportError:
        from .slow import helper
    (staging / "kernel").write_text(f"{helper(x)}")
"""
_BY_WRAPS = """
import json

@functools.wraps(json.dumps)
def helper(x): return json.dumps(x + 1)

original, other = helper, lambda x: x
"""
HELPERS += [
    reads("a helper in a module with the name of one of Python's", _NAMED_AS_PYTHONS, "wave.helper(x)", ("x + N", "x - N"),
          "wave.helper = wave.other", "wave.helper = original", "helper", files={"wave.py": _KERNELS}),
    reads("a class in a module with the name of one of Python's", _NAMED_AS_PYTHONS.replace("wave", "sched"),
          "sched.Config().tile()", ("return 7", "return 8"), "original, sched.Config.tile = sched.Config.tile, "
          "lambda self: 8", "sched.Config.tile = original", "tile", files={"sched.py": _KERNELS}),
    reads("a helper of a file that is loaded under an installed package's name", _BY_PATH, "helper(x)", ("x + N", "x - N"),
          "helper = kernels.other", "helper = original", "helper", files={"kernels.py": _KERNELS}),
    reads("a class of a file that is loaded under an installed package's name", _BY_PATH, "kernels.Config().tile()",
          ("return 7", "return 8"), "original, kernels.Config.tile = kernels.Config.tile, lambda self: 8",
          "kernels.Config.tile = original", "tile", files={"kernels.py": _KERNELS}),
    reads("a helper in the closure of an installed decorator's wrapper", _INSTALLED, "helper(x)", ("x + 1", "x + 2"),
          "helper = twice(other)", "helper = original", "helper|other|inner",
          files={"site-packages/decorators_of_others.py": _TWICE}),
    Row("a helper that is imported in one of two ways", HEAD + _EITHER, "build(3)", ("x + 1", "x + 2"),
        "from . import fast\noriginal = fast.helper\nfast.helper = fast.other", "fast.helper = original", "helper",
        {"fast.py": "def helper(x): return x + 1\ndef other(x): return x\n", "slow.py": "def helper(x): return x\n"}),
    reads("a wrapper that has the name of what it wraps, which is Python's", _BY_WRAPS, "helper(x)", ("x + 1", "x + 2"),
          "helper = other", "helper = original", "helper"),
]  # fmt: skip

_SCALE = "def other(x, *more): return 0\noriginal = lower.registry[int]"
HELPERS += [
    reads("a function that singledispatch chooses", f"""
@functools.singledispatch
def lower(x): return 0

@lower.register(int)
def _(x): return x + 1

{_SCALE}
""", "lower(x)", ("x + 1", "x + 4"), "lower.register(int, other)", "lower.register(int, original)", "lower"),
    reads("a method that singledispatch chooses", f"""
class Lowering:
    @functools.singledispatchmethod
    def lower(self, x): return 0

    @lower.register(int)
    def _(self, x): return x + self.k

    k = 1

lowering = Lowering()
lower = vars(Lowering)["lower"].dispatcher
{_SCALE}
""", "lowering.lower(x)", ("k = 1", "k = 4"), "lower.register(int, other)", "lower.register(int, original)", "lower"),
]  # fmt: skip

_CLASSES = """
@dataclass(frozen=True)
class Base:
    @compile_once()
    def build(self, x, *, staging):
        (staging / "kernel").write_text(f"{self.helper(x)} {self.tile} {self.size}")

    tile = 1
    size = property(lambda self: 7)

    def helper(self, x):
        return x + 10

@dataclass(frozen=True)
class Derived(Base):
    def helper(self, x):
        return super().helper(x) + 100

class Brief(Base):
    tile = 5

original = Derived.helper
chosen = Derived
"""
_METHODS = (
    ("an overridden method", "+ 100", "+ 200", "Derived.helper = lambda self, x: 0", "Derived.helper = original", "helper"),
    ("a method that an overriding one calls through super()", "+ 10\n", "+ 20\n",
     "original, Base.helper = Base.helper, lambda self, x: 0", "Base.helper = original", "helper"),
    ("an inherited class attribute", "tile = 1\n", "tile = 2\n", "Base.tile = 2", "Base.tile = 1", "tile"),
    ("a class attribute that a subclass begins to override", "class Derived(Base):", "class Derived(Base):\n    tile = 2",
     "Derived.tile = 2", "del Derived.tile", ""),
    ("a property", ": 7)", ": 8)", "original, Base.size = Base.size, property(lambda self: 8)", "Base.size = original", "size"),
    ("which subclass a method is called on", "chosen = Derived", "chosen = Brief", "chosen = Brief", "chosen = Derived", ""),
)  # fmt: skip
METHODS = [
    Row(what, HEAD + _CLASSES, "chosen().build(3)", (old, new), change, undo, names)
    for what, old, new, change, undo, names in _METHODS
]

_SCALER = """
class Scaler:
    def __init__(self, factor):
        self.factor = factor
    def scale(self, x):
        return x * self.factor

scaler = Scaler(2)
scale = scaler.scale
original = Scaler.scale
def other(self, x): return 0
"""
_OTHER_SCALE = ("Scaler.scale = other", "Scaler.scale = original", "scale")

OBJECTS = [
    reads("a method of a global object", _SCALER, "scaler.scale(x)", ("x * self", "x + self"), *_OTHER_SCALE),
    reads("an attribute that a method of a global object reads", _SCALER, "scaler.scale(x)",
          ("Scaler(2)", "Scaler(3)"), "scaler.factor = 3", "scaler.factor = 2", "factor"),
    reads("the object of a bound method", _SCALER, "scale(x)",
          ("Scaler(2)", "Scaler(3)"), "scaler.factor = 3", "scaler.factor = 2", "scale|factor"),
    reads("an argument of a partial method", "class Scaler:\n    def scale(self, k, x): return k * x\n"
          "    double = functools.partialmethod(scale, 2)\nscaler = Scaler()\noriginal = vars(Scaler)['double']",
          "scaler.double(x)", ("scale, 2", "scale, 3"), "Scaler.double = functools.partialmethod(Scaler.scale, 4)",
          "Scaler.double = original", "double|partialmethod"),
    reads("a method of a metaclass", "class Meta(type):\n    def scale(cls, x): return x * cls.k\n"
          "class Scaler(metaclass=Meta):\n    k = 2\noriginal = Meta.scale", "Scaler.scale(x)", ("x * cls", "x + cls"),
          "Meta.scale = lambda cls, x: 0", "Meta.scale = original", "scale"),
    reads("what a metaclass does when its class is called", "class Meta(type):\n    def __call__(cls, x): return x + 1\n"
          "class Scaler(metaclass=Meta): pass\noriginal = Meta.__call__", "Scaler(x)", ("x + 1", "x + 4"),
          "Meta.__call__ = lambda cls, x: 0", "Meta.__call__ = original", "__call__"),
    Row("an attribute of the method's own object", HEAD + '''
@dataclass
class Maker:
    tile: int

    @compile_once()
    def build(self, x, *, staging):
        (staging / "kernel").write_text(f"{x + self.tile}")

maker = Maker(1)
''', "maker.build(3)", ("Maker(1)", "Maker(2)"), "maker.tile = 2", "maker.tile = 1"),
    Row("a method of a class without any signature", HEAD + '''
class Maker:
    @compile_once()
    def build(self, x, *, staging):
        (staging / "kernel").write_text(f"{self.helper(x)}")

    def helper(self, x):
        return x + 10

original = Maker.helper
maker = Maker()
''', "maker.build(3)", ("+ 10", "+ 20"), "Maker.helper = lambda self, x: 0", "Maker.helper = original", "helper"),
]  # fmt: skip

NAMES = [
    Row("the kernel's name", HEAD + '''
import sys

@compile_once()
def scale(x, *, staging):
    (staging / "kernel").write_text(f"{sys._getframe().f_code.co_name}({x})")

@compile_once()
def shift(x, *, staging):
    (staging / "kernel").write_text(f"{sys._getframe().f_code.co_name}({x})")

build = scale
''', "build(3)", ("build = scale", "build = shift"), "build = shift", "build = scale"),
]  # fmt: skip

ROWS = [*HELPERS, *METHODS, *OBJECTS, *NAMES]
