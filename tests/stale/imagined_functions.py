"""Imagined rows: functions in all their forms, and what is put on, in and around them."""

from __future__ import annotations

from tests.stale.imagined_row import does, reads, swaps

_ADD = "def add(x, y): return x + 10 * y\ndef sub(x, y): return x - 10 * y\n"

FORMS = [
    reads("a partial of a partial's keyword", _ADD + "one = functools.partial(add, y=1)\nstep = functools.partial(one, 5)",
          "step()", ("y=1", "y=2"), "step.keywords['y'] = 2", "step.keywords['y'] = 1"),
    reads("a partial of a bound method", "class Scaler:\n    k = 2\n    def scale(self, x): return x * self.k\n"
          "step = functools.partial(Scaler().scale, 5)", "step()", ("k = 2", "k = 3"), "Scaler.k = 3", "Scaler.k = 2"),
    reads("a partial of a class", "class Config:\n    def __init__(self, n): self.n = n + K\nK = 1\n"
          "make = functools.partial(Config, 2)", "make().n", ("K = 1", "K = 2"), "K = 2", "K = 1"),
    reads("an attribute that is put on a partial", _ADD + "step = functools.partial(add, 1)\nstep.tile = 1", "step.tile",
          ("tile = 1", "tile = 2"), "step.tile = 2", "step.tile = 1"),
    reads("an attribute that is put on a function by a decorator", "def tiled(n):\n    def decorate(f):\n        f.tile = n\n"
          "        return f\n    return decorate\n@tiled(1)\ndef helper(x): return x", "helper.tile", ("tiled(1)", "tiled(2)"),
          "helper.tile = 2", "helper.tile = 1"),
    reads("an attribute that a function reads of itself", "def helper(x): return x + helper.n\nhelper.n = 1", "helper(x)",
          ("n = 1", "n = 2"), "helper.n = 2", "helper.n = 1"),
    does("which of two decorators is the outer one", "def add(f): return lambda x: f(x) + 1\n"
         "def double(f): return lambda x: f(x) * 2\ndef inner(x): return x\nhelper = add(double(inner))", "out = helper(x)",
         ("add(double(", "double(add("), "helper = double(add(inner))", "helper = add(double(inner))"),
    reads("the function under three decorators", "def same(f): return lambda x: f(x)\n@same\n@same\n@same\n"
          "def helper(x): return x + N\nN = 1", "helper(x)", ("N = 1", "N = 2"), "N = 2", "N = 1"),
    swaps("what a class that decorates does", "class Traced:\n    def __init__(self, f): self.f = f\n"
          "    def __call__(self, x): return self.f(x) + 1\n@Traced\ndef helper(x): return x", "helper(x)",
          ("self.f(x) + 1", "self.f(x) + 2"), "Traced.__call__", "lambda self, x: 0", refuses=True),
    reads("a function that a decorator puts in a table", "TABLE = {}\ndef register(name):\n    def decorate(f):\n"
          "        TABLE[name] = f\n        return f\n    return decorate\n@register('one')\ndef _(x): return x + 1",
          "TABLE['one'](x)", ("x + 1", "x + 2"), "kept = TABLE['one']\nTABLE['one'] = lambda x: 0", "TABLE['one'] = kept"),
    reads("what functools.wraps wraps, called as __wrapped__", "def inner(x): return x + N\nN = 1\n@functools.wraps(inner)\n"
          "def helper(x): return 0", "helper.__wrapped__(x)", ("N = 1", "N = 2"), "N = 2", "N = 1"),
    reads("a global of a function that lru_cache caches", "N = 1\n@functools.lru_cache\ndef helper(x): return x + N",
          "helper(x)", ("N = 1", "N = 2"), "N = 2\nhelper.cache_clear()", "N = 1\nhelper.cache_clear()"),
    reads("a global of a function that functools.cache caches in a table", "N = 1\n@functools.cache\ndef one(x): return x + N\n"
          "TABLE = [one]", "[f(x) for f in TABLE]", ("N = 1", "N = 2"), "N = 2\none.cache_clear()", "N = 1\none.cache_clear()",
          refuses=True),
    reads("a step of functools.reduce", "def step(a, b): return a * K + b\nK = 2", "functools.reduce(step, [1, 2, x])",
          ("K = 2", "K = 3"), "K = 3", "K = 2"),
    reads("a key that sorted calls", "def key(a): return a * SIGN\nSIGN = 1", "sorted([2, x, 1], key=key)",
          ("SIGN = 1", "SIGN = -1"), "SIGN = -1", "SIGN = 1"),
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
    reads("the order of functions in a list", "def one(x): return x + 1\ndef two(x): return x * 2\nSTEPS = [one, two]",
          "functools.reduce(lambda v, f: f(v), STEPS, x)", ("[one, two]", "[two, one]"), "STEPS.reverse()",
          "STEPS.reverse()"),
    reads("lambdas of a loop, which share their code", "STEPS = [lambda x, n=n: x + n for n in (1, 2)]",
          "[f(x) for f in STEPS]", ("in (1, 2)", "in (1, 3)"), "STEPS.reverse()", "STEPS.reverse()"),
    reads("a loop's variable in the closure of a list's functions", "def make(sizes):\n    def one(n): return lambda x: x + n\n"
          "    return [one(n) for n in sizes]\nSTEPS = make([1, 2])", "[f(x) for f in STEPS]", ("[1, 2]", "[1, 3]"),
          "kept, STEPS = STEPS, make([1, 3])", "STEPS = kept"),
    swaps("two helpers that call each other", "def even(n): return True if n == 0 else odd(n - 1)\n"
          "def odd(n): return False if n == 0 else even(n - 1)", "even(x)", ("return False", "return None"), "odd",
          "lambda n: 7"),
    reads("a nested function that reads its outer function's closure", "def make(n):\n    def middle():\n"
          "        def inner(): return n\n        return inner\n    return middle\nmiddle = make([1])", "middle()()",
          ("make([1])", "make([2])"), "middle.__closure__[0].cell_contents[0] = 2",
          "middle.__closure__[0].cell_contents[0] = 1"),
    reads("a closure's dict that another function fills", "def make():\n    table = {}\n    def put(n): table['n'] = n\n"
          "    def get(): return table['n']\n    return put, get\nput, get = make()\nput(1)", "get()", ("put(1)", "put(2)"),
          "put(2)", "put(1)"),
]  # fmt: skip

BODIES = [
    reads("what a generator yields", "def sizes(n):\n    for k in range(n): yield k + STEP\nSTEP = 1", "list(sizes(x))",
          ("STEP = 1", "STEP = 2"), "STEP = 2", "STEP = 1"),
    swaps("the generator that a generator delegates to", "def inner(): yield 1\ndef outer(): yield from inner()",
          "list(outer())", ("yield 1", "yield 2"), "inner", "lambda: [3]"),
    swaps("what an async helper returns", "import asyncio\nasync def inner(x): return x + 1\n"
          "async def outer(x): return await inner(x)\n"
          "def run(c):\n    try: c.send(None)\n    except StopIteration as end: return end.value", "run(outer(x))",
          ("x + 1", "x + 2"), "inner", "type('', (), {'__await__': lambda s: iter(()), '__init__': lambda s, x: None})"),
    does("what a context manager of contextlib yields", "import contextlib\nN = 1\n@contextlib.contextmanager\n"
         "def tiles():\n    yield N", "with tiles() as out: pass", ("N = 1", "N = 2"), "N = 2", "N = 1"),
    reads("a global in the condition of a comprehension", "LIMIT = 1", "[n for n in range(x) if n > LIMIT]",
          ("LIMIT = 1", "LIMIT = 0"), "LIMIT = 0", "LIMIT = 1"),
    reads("a global in a dict comprehension of a set comprehension", "N = 1", "{k: sorted({v + N for v in (1, 2)}) for k in 'a'}",
          ("N = 1", "N = 2"), "N = 2", "N = 1"),
    does("a module that is named by a walrus", "from . import consts", "if (m := consts):\n    out = m.TILE",
         ("TILE = 1", "TILE = 2"), "consts.TILE = 2", "consts.TILE = 1", files={"consts.py": "TILE = 1\n"}),
    does("a value that a match statement compares with", "class Kinds:\n    FAST = 3",
         "match x:\n    case Kinds.FAST: out = 'fast'\n    case _: out = 'slow'", ("FAST = 3", "FAST = 4"), "Kinds.FAST = 4",
         "Kinds.FAST = 3"),
    does("an object that a loop goes through", "class Config:\n    def __init__(self, n): self.n = n\n"
         "CONFIGS = {'a': Config(1)}", "out = 0\nfor name, config in CONFIGS.items():\n    out += config.n",
         ("Config(1)", "Config(2)"), "CONFIGS['a'].n = 2", "CONFIGS['a'].n = 1", refuses=True),
    reads("a global in a nested f-string", "N = 1\nWIDTH = 5", "f'{f\"{x + N}\":>{WIDTH}}'", ("WIDTH = 5", "WIDTH = 6"),
          "WIDTH = 6", "WIDTH = 5"),
    reads("a global in a conversion of an f-string", "class Tile:\n    def __str__(self): return '1'\n"
          "    def __repr__(self): return NAME\nNAME = 'one'\ntile = Tile()", "f'{tile!r}'", ("'one'", "'two'"),
          "NAME = 'two'", "NAME = 'one'", refuses=True),
    does("a global that the function itself declares", "N = 1", "global N\nout = N\nN = N", ("N = 1\n", "N = 2\n"), "N = 2",
         "N = 1"),
    reads("a global by globals()", "N = 1", "globals()['N']", ("N = 1", "N = 2"), "N = 2", "N = 1", refuses=True),
    reads("a global that eval reads in a constant text", "N = 1", "eval('N + 1')", ("N = 1", "N = 2"), "N = 2", "N = 1",
          refuses=True),
    reads("the text that eval is given from a global", "TEXT = '1 + 1'", "eval(TEXT)", ("'1 + 1'", "'1 + 2'"),
          "TEXT = '1 + 2'", "TEXT = '1 + 1'", refuses=True),
    reads("a function that exec has made of a text", "TEXT = 'def helper(x): return x + 1'\nexec(TEXT)", "helper(x)",
          ("x + 1", "x + 2"), "kept = helper\nexec(TEXT.replace('+ 1', '+ 2'))", "helper = kept"),
    reads("two functions that exec has made of one name", "def made(text):\n    space = {}\n    exec(text, space)\n"
          "    return space['f']\none, two = made('def f(x): return x + 1'), made('def f(x): return x + 2')", "one(x) * two(x)",
          ("x + 2", "x + 3"), "one, two = two, two", "one, two = made('def f(x): return x + 1'), two"),
    reads("a global of a function that exec has made in a namespace of its own", "space = {'N': 1}\n"
          "exec('def helper(x): return x + N', space)\nhelper = space['helper']", "helper(x)", ("'N': 1", "'N': 2"),
          "space['N'] = 2", "space['N'] = 1"),
    reads("a function made by types.FunctionType with other globals", "import types\nN = 1\ndef inner(x): return x + N\n"
          "helper = types.FunctionType(inner.__code__, {'N': 5})", "helper(x)", ("'N': 5", "'N': 6"),
          "helper.__globals__['N'] = 6", "helper.__globals__['N'] = 5"),
    reads("a helper's docstring", "def helper():\n    'one'", "helper.__doc__", ("'one'", "'two'"), "helper.__doc__ = 'two'",
          "helper.__doc__ = 'one'"),
    reads("a class's docstring", "class Config:\n    'one'", "Config.__doc__", ("'one'", "'two'"), "Config.__doc__ = 'two'",
          "Config.__doc__ = 'one'"),
    reads("a module's docstring", "from . import notes", "notes.__doc__", ("'one'", "'two'"), "notes.__doc__ = 'two'",
          "notes.__doc__ = 'one'", files={"notes.py": "'one'\n"}),
    reads("a helper's annotations", "def helper(x: int): return x", "helper.__annotations__['x'].__name__", ("x: int", "x: str"),
          "helper.__annotations__['x'] = str", "helper.__annotations__['x'] = int"),
    reads("type hints that are written as text", "from typing import get_type_hints\nclass Config:\n    tile: 'Kind'\n"
          "Kind = int", "get_type_hints(Config)['tile'].__name__", ("Kind = int", "Kind = str"), "Kind = str", "Kind = int"),
    reads("the annotations of a class", "class Config:\n    tile: int", "Config.__annotations__", ("tile: int", "tile: str"),
          "Config.__annotations__['tile'] = str", "Config.__annotations__['tile'] = int"),
    reads("a helper's source by inspect.getsource", "import inspect\ndef one(x): return x + 1\ndef two(x): return x\n"
          "helper = one", "inspect.getsource(helper)", ("x + 1", "x + 2"), "helper = two", "helper = one"),
    reads("a helper's name", "def one(x): return x\nhelper = one", "helper.__name__", ("def one(x): return x\nhelper = one",
          "def two(x): return x\nhelper = two"), "helper.__name__ = 'two'", "helper.__name__ = 'one'"),
    reads("a helper's signature", "import inspect\ndef helper(tile=1): return 5", "inspect.signature(helper)",
          ("tile=1", "warps=1"), "helper.__signature__ = inspect.Signature()", "del helper.__signature__"),
    reads("the names of a helper's arguments", "def helper(tile): return 5", "helper.__code__.co_varnames",
          ("tile", "warps"), "kept = helper.__code__\nhelper.__code__ = (lambda warps: 5).__code__",
          "helper.__code__ = kept"),
    reads("a negative zero among a helper's constants", "def one(x): return -0.0\ndef two(x): return 0.0\nhelper = one",
          "helper(x)", ("return -0.0", "return -1.0"), "helper = two", "helper = one"),
    reads("the type of a constant of a helper", "def one(x): return (1, x)\ndef two(x): return (True, x)\nhelper = one",
          "helper(x)", ("(1, x)", "(1.0, x)"), "helper = two", "helper = one"),
    reads("the type of a constant in a helper's tuple", "def one(): return (1, 2)\ndef two(): return (1, 2.0)\nhelper = one",
          "helper()", ("return (1, 2)", "return (1, True)"), "helper = two", "helper = one"),
    reads("a constant of a function that is nested in a helper", "def one():\n    def inner(): return 1\n    return inner\n"
          "def two():\n    def inner(): return 2\n    return inner\nhelper = one", "helper()()", ("return 1", "return 3"),
          "helper = two", "helper = one"),
    reads("a template that string.Template fills", "import string\nTEXT = string.Template('tile $n')", "TEXT.substitute(n=x)",
          ("'tile $n'", "'warp $n'"), "TEXT.template = 'warp $n'", "TEXT.template = 'tile $n'", refuses=True),
    reads("the defaults of a helper set to nothing", "def helper(n=1): return n\ndef call(): return helper(*ARGS)\nARGS = ()",
          "call()", ("n=1", "n=2"), "helper.__defaults__ = (3,)", "helper.__defaults__ = (1,)"),
    reads("keyword defaults that are added", "def helper(*, n=1, m=2): return (n, m)", "helper()", ("m=2", "m=3"),
          "helper.__kwdefaults__ = {'n': 1, 'm': 3}", "helper.__kwdefaults__ = {'n': 1, 'm': 2}"),
    reads("a default that is a function", "def one(): return 1\ndef helper(f=one): return f()", "helper()",
          ("return 1", "return 2"), "kept = one.__code__\none.__code__ = (lambda: 3).__code__", "one.__code__ = kept"),
    reads("a default that is an object", "class Config: pass\nconfig = Config()\nconfig.tile = 1\n"
          "def helper(c=config): return c.tile", "helper()", ("tile = 1", "tile = 2"), "config.tile = 2", "config.tile = 1",
          refuses=True),
]  # fmt: skip

_DISPATCH = {"dispatch.py": "import functools\n@functools.singledispatch\ndef lower(x): return 0\n",
             "rules.py": "from .dispatch import lower\n@lower.register(int)\ndef _(x): return x + 1\n"}  # fmt: skip
_BY_CLASS = "class Tile:\n    n = 1\n@lower.register(Tile)\ndef _(x): return x.n\n"

ELSEWHERE = [
    reads("a function that singledispatch of another file chooses", "from .dispatch import lower\nfrom . import rules\n"
          "kept = lower.registry[int]", "lower(x)", ("x + 1", "x + 2"), "lower.register(int, lambda x: 9)",
          "lower.register(int, kept)", files=_DISPATCH),
    reads("what a class holds for which singledispatch chooses", f"from .dispatch import lower\n{_BY_CLASS}", "lower(Tile())",
          ("n = 1", "n = 2"), "Tile.n = 2", "Tile.n = 1", files=_DISPATCH),
    swaps("a function that a nested class of the helper calls", "def one(): return 1\ndef helper():\n    class Config:\n"
          "        tile = one()\n    return Config.tile", "helper()", ("return 1", "return 2"), "one", "lambda: 3"),
    swaps("a base class that the function itself derives from", "class Base:\n    tile = 1\nclass Other:\n    tile = 5\n"
          "def helper():\n    class Config(Base): pass\n    return Config.tile", "helper()", ("tile = 1", "tile = 2"), "Base",
          "Other"),
    swaps("a decorator that the function itself applies", "def deco(f): return lambda: f() + 1\ndef helper():\n    @deco\n"
          "    def inner(): return 1\n    return inner()", "helper()", ("f() + 1", "f() + 2"), "deco", "lambda f: f"),
    does("a helper that the except clause calls", "def helper(): return 1\nkept = helper",
         "try:\n    raise ValueError\nexcept ValueError:\n    out = helper()", ("return 1", "return 2"),
         "helper = lambda: 3", "helper = kept"),
    does("the exception that a clause catches", "class One(Exception): pass\nclass Two(Exception): pass\nCaught = One",
         "try:\n    raise One\nexcept Caught:\n    out = 1\nexcept Exception:\n    out = 2", ("Caught = One", "Caught = Two"),
         "Caught = Two", "Caught = One"),
    does("a helper that is called by its name in a local table", "def one(x): return x + 1\nkept = one",
         "table = {'one': one}\nout = table['one'](x)", ("x + 1", "x + 2"), "one = lambda x: 0", "one = kept"),
    does("an attribute of an object that a helper is given", "class Config: pass\nconfig = Config()\nconfig.tile = 1\n"
         "def size(c): return c.tile", "out = size(config)", ("tile = 1", "tile = 2"), "config.tile = 2", "config.tile = 1",
         refuses=True),
    does("a method of what a helper's method returns", "class Inner:\n    def size(self): return N\nclass Outer:\n"
         "    def inner(self): return Inner()\nouter = Outer()\nN = 1", "out = outer.inner().size()", ("N = 1", "N = 2"),
         "N = 2", "N = 1"),
    does("a method by getattr with a constant prefix", "class Lowering:\n    def visit_int(self): return N\n"
         "    def visit(self, x): return getattr(self, 'visit_' + type(x).__name__)()\nN = 1", "out = Lowering().visit(x)",
         ("N = 1", "N = 2"), "N = 2", "N = 1", refuses=True),
    does("a visitor's method that ast.NodeVisitor calls", "import ast\nclass Visitor(ast.NodeVisitor):\n"
         "    def visit_Name(self, node): self.found = node.id + SUFFIX\nSUFFIX = '1'",
         "visitor = Visitor()\nvisitor.visit(ast.parse('tile'))\nout = visitor.found", ("SUFFIX = '1'", "SUFFIX = '2'"),
         "SUFFIX = '2'", "SUFFIX = '1'"),
    does("a thread's target", "import threading\nN = 1\nfound = {}\ndef work(): found_of(N)\n"
         "def found_of(n): threading.current_thread().n = n",
         "t = threading.Thread(target=work)\nt.start()\nt.join()\nout = t.n", ("N = 1", "N = 2"), "N = 2", "N = 1"),
    does("a value of a context variable", "import contextvars\nTILE = contextvars.ContextVar('TILE', default=1)",
         "out = TILE.get()", ("default=1", "default=2"), "kept = TILE.set(2)", "TILE.reset(kept)", refuses=True),
    does("a value of a thread's own", "import threading\nlocal = threading.local()\nlocal.tile = 1", "out = local.tile",
         ("tile = 1", "tile = 2"), "local.tile = 2", "local.tile = 1", refuses=True),
    does("what is counted under a lock", "import threading\nlock = threading.Lock()\nN = 1", "with lock:\n    out = N",
         ("N = 1", "N = 2"), "N = 2", "N = 1", refuses=True),
    does("how far a global iterator is", "import itertools\ncounter = itertools.count(1)",
         "import copy\nout = next(copy.copy(counter))",
         ("count(1)", "count(2)"), "counter = itertools.count(5)", "counter = itertools.count(1)", refuses=True),
    does("what a global generator of random numbers draws", "import random\nseeded = random.Random(1).getstate()",
         "rng = random.Random()\nrng.setstate(seeded)\nout = rng.random()", ("Random(1)", "Random(2)"),
         "seeded = random.Random(3).getstate()", "seeded = random.Random(1).getstate()"),
]  # fmt: skip

ROWS = [*FORMS, *BODIES, *ELSEWHERE]
