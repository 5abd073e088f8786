"""Imagined rows: functions in all their forms, and what is put on, in and around them."""

from __future__ import annotations

from tests.stale.imagined_row import does, reads, swaps

_ADD = "def add(x, y): return x + 10 * y\ndef sub(x, y): return x - 10 * y\n"

FORMS = [
    reads("a partial of a bound method", "class Scaler:\n    k = 2\n    def scale(self, x): return x * self.k\n"
          "step = functools.partial(Scaler().scale, 5)", "step()", ("k = 2", "k = 3"), "Scaler.k = 3", "Scaler.k = 2"),
    reads("a partial of a class", "class Config:\n    def __init__(self, n): self.n = n + K\nK = 1\n"
          "make = functools.partial(Config, 2)", "make().n", ("K = 1", "K = 2"), "K = 2", "K = 1"),
    reads("an attribute that is put on a partial", _ADD + "step = functools.partial(add, 1)\nstep.tile = 1", "step.tile",
          ("tile = 1", "tile = 2"), "step.tile = 2", "step.tile = 1"),
    reads("a global of a function that lru_cache caches", "N = 1\n@functools.lru_cache\ndef helper(x): return x + N",
          "helper(x)", ("N = 1", "N = 2"), "N = 2\nhelper.cache_clear()", "N = 1\nhelper.cache_clear()"),
    reads("a global of a function that functools.cache caches in a table", "N = 1\n@functools.cache\ndef one(x): return x + N\n"
          "TABLE = [one]", "[f(x) for f in TABLE]", ("N = 1", "N = 2"), "N = 2\none.cache_clear()", "N = 1\none.cache_clear()",
          refuses=True),
    reads("a comparison in functools.cmp_to_key", "SIGN = 1\nkey = functools.cmp_to_key(lambda a, b: (a - b) * SIGN)",
          "sorted([2, x, 1], key=key)", ("SIGN = 1", "SIGN = -1"), "SIGN = -1", "SIGN = 1", refuses=True),
    reads("which of operator's functions a table holds", "import operator\nOPS = {'+': operator.add, '-': operator.sub}",
          "OPS['+'](x, 1)", ("{'+': operator.add, '-': operator.sub}", "{'+': operator.sub, '-': operator.add}"),
          "OPS['+'] = operator.sub", "OPS['+'] = operator.add"),
    reads("which of two lambdas on one line", "one, two = (lambda x: x + 1), (lambda x: x - 1)\nchosen = one", "chosen(x)",
          ("chosen = one", "chosen = two"), "chosen = two", "chosen = one"),
    reads("a lambda in a dict of lambdas on one line", "STEPS = {'a': lambda x: x + 1, 'b': lambda x: x - 1}", "STEPS['a'](x)",
          ("x + 1", "x + 2"), "STEPS['a'], STEPS['b'] = STEPS['b'], STEPS['a']",
          "STEPS['a'], STEPS['b'] = STEPS['b'], STEPS['a']"),
]  # fmt: skip

BODIES = [
    swaps("what an async helper returns", "import asyncio\nasync def inner(x): return x + 1\n"
          "async def outer(x): return await inner(x)\n"
          "def run(c):\n    try: c.send(None)\n    except StopIteration as end: return end.value", "run(outer(x))",
          ("x + 1", "x + 2"), "inner", "type('', (), {'__await__': lambda s: iter(()), '__init__': lambda s, x: None})"),
    does("what a context manager of contextlib yields", "import contextlib\nN = 1\n@contextlib.contextmanager\n"
         "def tiles():\n    yield N", "with tiles() as out: pass", ("N = 1", "N = 2"), "N = 2", "N = 1"),
    reads("a global in the condition of a comprehension", "LIMIT = 1", "[n for n in range(x) if n > LIMIT]",
          ("LIMIT = 1", "LIMIT = 0"), "LIMIT = 0", "LIMIT = 1"),
    does("a module that is named by a walrus", "from . import consts", "if (m := consts):\n    out = m.TILE",
         ("TILE = 1", "TILE = 2"), "consts.TILE = 2", "consts.TILE = 1", files={"consts.py": "TILE = 1\n"}),
    reads("a global by globals()", "N = 1", "globals()['N']", ("N = 1", "N = 2"), "N = 2", "N = 1", refuses=True),
    reads("a global that eval reads in a constant text", "N = 1", "eval('N + 1')", ("N = 1", "N = 2"), "N = 2", "N = 1",
          refuses=True),
    reads("a helper's docstring", "def helper():\n    'one'", "helper.__doc__", ("'one'", "'two'"), "helper.__doc__ = 'two'",
          "helper.__doc__ = 'one'"),
    reads("a helper's annotations", "def helper(x: int): return x", "helper.__annotations__['x'].__name__", ("x: int", "x: str"),
          "helper.__annotations__['x'] = str", "helper.__annotations__['x'] = int"),
    reads("type hints that are written as text", "from typing import get_type_hints\nclass Config:\n    tile: 'Kind'\n"
          "Kind = int", "get_type_hints(Config)['tile'].__name__", ("Kind = int", "Kind = str"), "Kind = str", "Kind = int"),
    reads("the annotations of a class", "class Config:\n    tile: int", "Config.__annotations__", ("tile: int", "tile: str"),
          "Config.__annotations__['tile'] = str", "Config.__annotations__['tile'] = int"),
    reads("a helper's signature", "import inspect\ndef helper(tile=1): return 5", "inspect.signature(helper)",
          ("tile=1", "warps=1"), "helper.__signature__ = inspect.Signature()", "del helper.__signature__"),
    reads("a template that string.Template fills", "import string\nTEXT = string.Template('tile $n')", "TEXT.substitute(n=x)",
          ("'tile $n'", "'warp $n'"), "TEXT.template = 'warp $n'", "TEXT.template = 'tile $n'", refuses=True),
    reads("keyword defaults that are added", "def helper(*, n=1, m=2): return (n, m)", "helper()", ("m=2", "m=3"),
          "helper.__kwdefaults__ = {'n': 1, 'm': 3}", "helper.__kwdefaults__ = {'n': 1, 'm': 2}"),
]  # fmt: skip

ELSEWHERE = [
    swaps("a function that a nested class of the helper calls", "def one(): return 1\ndef helper():\n    class Config:\n"
          "        tile = one()\n    return Config.tile", "helper()", ("return 1", "return 2"), "one", "lambda: 3"),
    swaps("a base class that the function itself derives from", "class Base:\n    tile = 1\nclass Other:\n    tile = 5\n"
          "def helper():\n    class Config(Base): pass\n    return Config.tile", "helper()", ("tile = 1", "tile = 2"), "Base",
          "Other"),
    does("a helper that the except clause calls", "def helper(): return 1\nkept = helper",
         "try:\n    raise ValueError\nexcept ValueError:\n    out = helper()", ("return 1", "return 2"),
         "helper = lambda: 3", "helper = kept"),
    does("the exception that a clause catches", "class One(Exception): pass\nclass Two(Exception): pass\nCaught = One",
         "try:\n    raise One\nexcept Caught:\n    out = 1\nexcept Exception:\n    out = 2", ("Caught = One", "Caught = Two"),
         "Caught = Two", "Caught = One"),
    does("a method by getattr with a constant prefix", "class Lowering:\n    def visit_int(self): return N\n"
         "    def visit(self, x): return getattr(self, 'visit_' + type(x).__name__)()\nN = 1", "out = Lowering().visit(x)",
         ("N = 1", "N = 2"), "N = 2", "N = 1", refuses=True),
    does("a value of a context variable", "import contextvars\nTILE = contextvars.ContextVar('TILE', default=1)",
         "out = TILE.get()", ("default=1", "default=2"), "kept = TILE.set(2)", "TILE.reset(kept)", refuses=True),
    does("a value of a thread's own", "import threading\nlocal = threading.local()\nlocal.tile = 1", "out = local.tile",
         ("tile = 1", "tile = 2"), "local.tile = 2", "local.tile = 1", refuses=True),
    does("what is counted under a lock", "import threading\nlock = threading.Lock()\nN = 1", "with lock:\n    out = N",
         ("N = 1", "N = 2"), "N = 2", "N = 1", refuses=True),
    does("how far a global iterator is", "import itertools\ncounter = itertools.count(1)",
         "import copy\nout = next(copy.copy(counter))",
         ("count(1)", "count(2)"), "counter = itertools.count(5)", "counter = itertools.count(1)", refuses=True),
]  # fmt: skip

ROWS = [*FORMS, *BODIES, *ELSEWHERE]
