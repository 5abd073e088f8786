"""Rows of Triton: code that a kernel calls. Helpers, near and far, methods, functions among its arguments, functions of
the host (``triton.constexpr_function``, from 3.5 on); and its name.
"""

from __future__ import annotations

import triton

from tests.stale.row import Row
from tests.stale.triton_values import HEAD, NEW, SAME, stores

_TWO = "@triton.jit\ndef helper(v): return v + 1\n@triton.jit\ndef other(v): return v + 2\noriginal = helper\n"
_FAR = {
    "far/__init__.py": "",
    "far/away.py": """
        import triton
        import triton.language as tl
        N = 1

        @triton.jit
        def helper(v):
            return v + N

        @triton.jit
        def other(v):
            return v + 2
        """,
}
_SWAP = ("helper = other", "helper = original", "helper")
HELPERS = [
    stores("a helper in another directory", "from .far.away import helper, other\noriginal = helper", "helper(tl.load(x))",
           ("v + N", "v - N"), *_SWAP, files=_FAR, stock=SAME),
]  # fmt: skip

_OPS = """
@triton.jit
def add(v): return v + 1

@triton.jit
def subtract(v): return v - 3

class Base:
    step = add

class Derived(Base):
    step = subtract

ops = Derived
"""

METHODS = [
    stores("an overridden method", _OPS, "Derived.step(tl.load(x))",
           ("v - 3", "v - 7"), "Derived.step = add", "Derived.step = subtract", "step", stock=SAME),
    stores("an inherited method", _OPS.replace("step = subtract", "pass"), "Derived.step(tl.load(x))",
           ("v + 1", "v + 7"), "Base.step = subtract", "Base.step = add", "step", stock=SAME),
]  # fmt: skip

_CALLS = (
    HEAD
    + """
def weigh(a, b, c=0): return 2 * a + 10 * b + 100 * c
def other(a, b, c=0): return a - b
original = weigh.__code__
step = MADE

@triton.jit
def kernel(x, F: tl.constexpr):
    tl.store(x, F(1))  # {what}
"""
)

_PASSED = """
@triton.jit
def kernel(x, F: tl.constexpr):
    tl.store(x, F(tl.load(x)))  # {what}
"""


_HOLDS = """
@dataclass(frozen=True)
class Config:
    step: object

config = Config({step})

@triton.jit
def kernel(x, C: tl.constexpr):
    tl.store(x, C.step(tl.load(x)))  # {what}
"""


def passes(what: str, made: str, edit: tuple[str, str], change: str, undo: str) -> Row:
    """The function ``step`` is a constant of the launch. Triton's key names it by address: no other process can hit."""
    names = "" if change.startswith("step =") else "weigh"
    return Row(what, _CALLS.replace("MADE", made), "launch(kernel, F=step)", edit, change, undo, names, shared=False)


ARGUMENTS = [
    passes("a partial keyword argument", "functools.partial(weigh, b=2)", ("b=2", "b=3"),
           "step.keywords['b'] = 3", "step.keywords['b'] = 2"),
    passes("an argument of a nested partial", "functools.partial(functools.partial(weigh, 2), c=3)", ("weigh, 2", "weigh, 3"),
           "step = functools.partial(functools.partial(weigh, 3), c=3)",
           "step = functools.partial(functools.partial(weigh, 2), c=3)"),
    Row("whether a helper among the arguments is inlined", HEAD + """
@triton.jit(noinline=False)
def step(v): return v + 1

@triton.jit(noinline=True)
def other(v): return v + 1

original = step
""" + _PASSED, "launch(kernel, F=step)", ("noinline=False", "noinline=True"), "step = other", "step = original", stock=NEW),
    Row("a module's constant that a helper in an object among the arguments reads", HEAD + "from .far import away\n"
        "@triton.jit\ndef helper(v): return v + away.N\n" + _HOLDS.replace("{step}", "helper"), "launch(kernel, C=config)",
        ("N = 1", "N = 2"), "away.N = 2", "away.N = 1", "N", _FAR, stock=SAME | NEW),
    Row("a module's constant that a helper among the arguments reads",
        HEAD + "from .far import away\n@triton.jit\ndef step(v): return v + away.N\n" + _PASSED, "launch(kernel, F=step)",
        ("N = 1", "N = 2"), "away.N = 2", "away.N = 1", "N", _FAR, stock=SAME | NEW),
]  # fmt: skip

NAMES = [
    Row("the kernel's name", HEAD + """
@triton.jit
def scale(x):
    tl.store(x, 1)  # {what}

@triton.jit
def shift(x):
    tl.store(x, 1)  # {what}

kernel = scale
""", "launch(kernel)", ("kernel = scale", "kernel = shift"), "kernel = shift", "kernel = scale"),
]  # fmt: skip


def computes(
    what: str, setup: str, body: str, edit: tuple[str, str] | None, change: str, undo: str, names: str, **more: object
) -> Row:
    """A kernel that stores what a function of the host returns."""
    host = f"\n@triton.constexpr_function\ndef host():\n    return {body}\n"
    return stores(what, setup + host, "host()", edit, change, undo, names, **more)  # type: ignore[arg-type]


HOST = [
    computes("a function of the host", "def helper(): return 3", "1", ("return 1", "return 2"),
             "original, host = host, triton.constexpr_function(helper)", "host = original", "host"),
    computes("a list that a function of the host reads", "SIZES = [1, 2]", "len(SIZES)",
             ("[1, 2]", "[1, 2, 3]"), "SIZES.append(3)", "SIZES.pop()", "SIZES", stock=NEW),
    computes("a module's constant that a function of the host reads", "from . import consts", "consts.TILE",
             ("TILE = 1", "TILE = 2"), "consts.TILE = 2", "consts.TILE = 1", "TILE", stock=SAME | NEW,
             files={"consts.py": "TILE = 1\n"}),
    computes("an environment variable that a function of the host reads", "import os", "int(os.environ['SUBJECT_FLAG'])",
             None, "", "", "", environ={"SUBJECT_FLAG": ("1", "2")}, stock=SAME | NEW),
] if hasattr(triton, "constexpr_function") else []  # fmt: skip

_CONSTS = {"consts.py": "TILE = 1\n"}


def puts(
    what: str, setup: str, put: str, read: str, edit: tuple[str, str], change: str, undo: str, **more: object
) -> Row:
    """The project puts ``put`` into a module of Triton's, where a kernel reads it."""
    follows = _TWO in setup and not hasattr(triton, "constexpr_function")  # Triton 3.4 follows helpers there
    stock = SAME if follows else SAME | NEW
    return stores(what, f"{setup}\n{put}", read, edit, change, undo, "", stock=stock, **more)


PUT_INTO_TRITON = [
    puts("a helper put into Triton's module", _TWO, "tl.stale_helper = helper", "tl.stale_helper(tl.load(x))",
         ("v + 1", "v + 4"), "tl.stale_helper = other", "tl.stale_helper = original"),
    puts("a global of a helper put into Triton's module", "M = 1\n@triton.jit\ndef helper(v): return v + M",
         "tl.stale_adder = helper", "tl.stale_adder(tl.load(x))", ("M = 1", "M = 2"), "M = 2", "M = 1"),
    puts("a helper put into Triton's module that reads another", _TWO + "tl.stale_inner = helper\n"
         "@triton.jit\ndef outer(v): return tl.stale_inner(v)", "tl.stale_outer = outer", "tl.stale_outer(tl.load(x))",
         ("v + 1", "v + 4"), "tl.stale_inner = other", "tl.stale_inner = original"),
    puts("a helper put into a module of Triton's package", _TWO, "tl.math.stale_helper = helper",
         "tl.math.stale_helper(tl.load(x))", ("v + 1", "v + 4"), "tl.math.stale_helper = other",
         "tl.math.stale_helper = original"),
    puts("a constexpr put into Triton's module", "", "tl.STALE = tl.constexpr(1)", "tl.STALE",
         ("constexpr(1)", "constexpr(2)"), "tl.STALE = tl.constexpr(2)", "tl.STALE = tl.constexpr(1)"),
    puts("the value in a constexpr put into Triton's module", "", "tl.STALE_VALUE = tl.constexpr(1)", "tl.STALE_VALUE",
         ("constexpr(1)", "constexpr(2)"), "tl.STALE_VALUE.value = 2", "tl.STALE_VALUE.value = 1"),
    puts("a constexpr put into a module of Triton's package", "", "tl.extra.STALE = tl.constexpr(1)", "tl.extra.STALE",
         ("constexpr(1)", "constexpr(2)"), "tl.extra.STALE = tl.constexpr(2)", "tl.extra.STALE = tl.constexpr(1)"),
    puts("a scalar put into Triton itself", "", "triton.STALE = 1", "triton.STALE",
         ("STALE = 1", "STALE = 2"), "triton.STALE = 2", "triton.STALE = 1"),
    puts("a module put into Triton's", "from . import consts", "tl.stale_consts = consts", "tl.stale_consts.TILE",
         ("TILE = 1", "TILE = 2"), "consts.TILE = 2", "consts.TILE = 1", files=_CONSTS),
    puts("which function of Triton's a name put into its module is", "", "tl.stale_choose = tl.maximum",
         "tl.stale_choose(tl.load(x), 3)", ("= tl.maximum", "= tl.minimum"), "tl.stale_choose = tl.minimum",
         "tl.stale_choose = tl.maximum"),
    puts("a function of Triton's that the project replaces", _TWO, "tl.ravel = helper", "tl.ravel(tl.load(x))",
         ("v + 1", "v + 4"), "tl.ravel = other", "tl.ravel = original"),
    puts("a helper put into Triton's module through a module of the project", "from . import lib\n" + _TWO,
         "tl.stale_through = helper", "lib.tl.stale_through(tl.load(x))", ("v + 1", "v + 4"),
         "tl.stale_through = other", "tl.stale_through = original", files={"lib.py": "import triton.language as tl\n"}),
]  # fmt: skip

if hasattr(triton, "constexpr_function"):
    PUT_INTO_TRITON += [
        computes("a constant put into Triton's module that a function of the host reads", "tl.STALE_HOST = 1", "tl.STALE_HOST",
                 ("STALE_HOST = 1", "STALE_HOST = 2"), "tl.STALE_HOST = 2", "tl.STALE_HOST = 1", "", stock=SAME | NEW),
]  # fmt: skip
    HOST += [
        stores("an environment variable that a function of the host reads by an alias", """
import os

@triton.constexpr_function
def host():
    e = os.environ
    return int(e["SUBJECT_ALIAS"])
""", "host()", None, "", "", "", environ={"SUBJECT_ALIAS": ("1", "2")}, stock=SAME | NEW),
]  # fmt: skip

ROWS = [*HELPERS, *METHODS, *ARGUMENTS, *NAMES, *HOST, *PUT_INTO_TRITON]
