"""Values that hide: two states of one program whose outputs differ never have one key."""

from __future__ import annotations

import builtins
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kcoord.errors import KeyFactorError
from kcoord.keys import CacheKey, Scope
from kcoord.keys import live_key as live
from kcoord.keys.device import DeviceKey, GPUTarget
from kcoord.keys.live_key import Declared, LiveKey

_ROOT = Path(__file__).parents[3]
_PACKAGE = """
def scale(k):
    def decorate(f):
        def call(x): return k * f(x)
        return call
    return decorate

def compose(*functions):
    def call(x):
        for f in functions: x = f(x)
        return x
    return call

class Scaled:
    def __init__(self, f, k): self.__wrapped__, self.k = f, k
    def __call__(self, x): return self.k * self.__wrapped__(x)

class Context:
    def __init__(self, mode): self.mode, self.state = mode, iter([])
    def enter(self): return self.mode

def within(context):
    enter = context.enter
    def decorate(f):
        def call(x): return f(x), enter()
        return call
    return decorate
"""


@pytest.fixture
def import_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a text while ``CHOICE``, a builtin, is 0 or 1: what a program makes of its command line, say."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "decorators_of_others.py").write_text(_PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))

    def run(text: str, choice: int) -> Any:
        monkeypatch.setattr(builtins, "CHOICE", choice, raising=False)
        (tmp_path / "hidden.py").write_text(text)
        sys.modules.pop("hidden", None)
        importlib.invalidate_caches()
        return importlib.import_module("hidden")

    yield run
    for name in ("hidden", "decorators_of_others"):
        sys.modules.pop(name, None)


def digest(build: Any, *args: Any) -> str:
    return LiveKey(build, Declared(scope=Scope.TARGET), Path).of(args, {}).key.digest


_BUILD = "\ndef build(x, *, staging=None):\n    "
_CHOSEN = "N = [64, 128][CHOICE]\n"
_LOCALS = [
    "tile = N\n    return 'T={tile}'.format(**locals())",
    "tile = N\n    return eval('tile + 1')",
    "a = N\n    b = a\n    c = b\n    d = c\n    e = d\n    f = e\n    return f",
    "tile = N\n    return '%(tile)s' % vars()",
]
_OTHERS = "from decorators_of_others import *\ndef f(x): return x\ndef h(x): return -x\n"
HIDDEN = [
    *(_CHOSEN + _BUILD + body for body in _LOCALS),
    "P = [lambda n: 0, lambda n: 16]\nchosen = P[CHOICE]" + _BUILD + "return chosen(x)",
    "P = [lambda n: None, lambda n: ()]\nchosen = P[CHOICE]" + _BUILD + "return chosen(x)",
    f"{_OTHERS}{_CHOSEN}g = scale(N)(f)" + _BUILD + "return g(x)",
    f"{_OTHERS}g = compose(f, [f, h][CHOICE])" + _BUILD + "return g(x)",
    f"{_OTHERS}{_CHOSEN}g = Scaled(f, N)" + _BUILD + "return g(x)",
    f"{_OTHERS}{_CHOSEN}g = within(Context(N))(f)" + _BUILD + "return g(x)",
    "import builtins\nbuiltins.MY_TILE = CHOICE + 3" + _BUILD + "return MY_TILE",
    "from collections import *\nV = [{'a': 1}, Counter(a=1)][CHOICE]" + _BUILD + "return V",
    "from collections import *\nV = ChainMap(*[[{'a': 1}], [{'a': 1}, {}]][CHOICE])" + _BUILD + "return V",
    "class C:\n    def m(self): return self\n    s = staticmethod(m)\nV = [C.m, vars(C)['s']][CHOICE]" + _BUILD + "return V",
    "def f(self): return 1\nclass C: p = [property(f), property(None, f)][CHOICE]" + _BUILD + "return C().p",
    "from fractions import Fraction\nV = Fraction(CHOICE + 1)" + _BUILD + "return V",
    "class C:\n    def __init__(self, n): self.n = n\n    def __repr__(self): return 'C'\nV = slice(C(CHOICE))"
    + _BUILD + "return V",
    "from operator import itemgetter\nget = itemgetter(CHOICE)" + _BUILD + "return get(x)",
    "from typing import Literal\nV = [Literal[1], Literal[2]][CHOICE]" + _BUILD + "return V",
]  # fmt: skip


@pytest.mark.parametrize("text", HIDDEN)
def test_two_states_of_a_program_have_two_keys(import_: Any, text: str) -> None:
    digests = [digest(import_(text, choice).build, 1) for choice in (0, 1, 0)]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize("base", ["collections.OrderedDict", "logging.Logger", "threading.local", "list"])
def test_a_subclass_of_a_class_that_holds_more_than_attributes_is_refused_or_told_apart(
    import_: Any, base: str
) -> None:
    name = "'log'" if "Logger" in base else ""
    text = (
        f"import collections, logging, threading\nclass C({base}): pass\nV = C({name})\nV.tile = CHOICE"
        + _BUILD
        + "return V"
    )
    try:
        digests = {digest(import_(text, choice).build, 1) for choice in (0, 1)}
    except KeyFactorError:
        return
    assert len(digests) == 2


@pytest.mark.parametrize("body", [
    "return ('QQ' if x else 'RR') in os.environ",
    "return (x or 'RR') in os.environ",
    "e = os.environ\n    return eval('e[\"QQ\"]')",
    "return print(os.environ, 'QQ')",
    "return {**os.environ}",
    "return [os.environ[n] for n in x]",
    "match os.environ:\n        case {'QQ': y, **rest}: return rest",
])  # fmt: skip
def test_a_use_of_the_environment_that_names_no_variable_is_refused(import_: Any, body: str) -> None:
    build = import_(f"import os{_BUILD}{body}", 0).build
    with pytest.raises(KeyFactorError, match=r"^line \d+ of hidden\.build reads the environment"):
        digest(build, 1)


def test_a_device_of_this_rank_is_the_same_to_every_rank(import_: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    digests = set()
    for ordinal in (0, 1):
        monkeypatch.setattr(live, "current_device", lambda at=ordinal: DeviceKey(GPUTarget("cuda", 90, 32), at))
        text = f"import torch\nDEVICE = torch.device('cuda:{{0}}'.format(CHOICE)){_BUILD}return DEVICE"
        digests.add(digest(import_(text, ordinal).build, 1))
    assert len(digests) == 1


_IN_SETS = """
import functools, sys
from dataclasses import dataclass
from kcoord.keys import CacheKey
from kcoord.keys.function.walk import content_of
def make(n):
    def f(): return n
    return f
OPS = {op: make(op) for op in {"add", "mul", "sub", "neg"}}
@dataclass(frozen=True)
class Pass: name: str
PASSES = frozenset(Pass(n) for n in ("a", "b", "c"))
def build(x): return OPS, PASSES, {"p", "q"}
print(CacheKey.of("python", "build", **content_of(build).factors()).digest)
"""


def test_the_order_of_sets_and_of_dicts_made_of_them_does_not_number_functions(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_IN_SETS)
    found = {
        subprocess.run(
            [sys.executable, script], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(_ROOT)},
            capture_output=True, text=True, timeout=60, check=True,
        ).stdout
        for seed in ("0", "1", "2", "3")
    }  # fmt: skip
    assert len(found) == 1


_PROXY = "class Proxy:\n    __class__ = property(lambda self: 1 / 0)\n    def __getattr__(self, name): raise RuntimeError(name)\n"
_RAISES = [
    f"{_PROXY}V = Proxy()",
    "class V:\n    def __cache_signature__(self): raise OSError('gone')\nV = V()",
    "class V:\n    def __getattribute__(self, name): raise RuntimeError('outside of a context')\nV = V()",
    "import types\nV = types.ModuleType('m')\nvars(V)[3] = 1",
]


@pytest.mark.parametrize("text", _RAISES)
@pytest.mark.parametrize("way", ["global", "argument"])
def test_an_error_of_the_programs_own_objects_is_a_key_error_if_it_is_one(import_: Any, text: str, way: str) -> None:
    module = import_(text + _BUILD + ("return V" if way == "global" else "return x"), 0)
    with suppress(KeyFactorError):
        assert digest(module.build, 1 if way == "global" else module.V)


def test_a_value_that_nobody_reads_is_not_asked_for_anything(import_: Any) -> None:
    assert digest(import_(f"{_PROXY}V = Proxy()" + _BUILD + "return x", 0).build, 1)


_HUGE = [
    "V = []\nfor _ in range(40): V = [V, V]",
    "class Op: pass\nV = [Op() for _ in range(12)]\nfor v in V: v.users = V",
]


@pytest.mark.parametrize("text", _HUGE)
def test_values_that_share_parts_end_with_a_remedy(import_: Any, text: str) -> None:
    with pytest.raises(KeyFactorError, match="__cache_signature__"):
        digest(import_(text + _BUILD + "return V", 0).build, 1)


ORDINARY = [
    "import types" + _BUILD + "return isinstance(x, types.FunctionType)",
    "import sys" + _BUILD + "return sys.version_info >= (3, 11)",
    "import torch" + _BUILD + "return torch.__version__ > '2'",
    "import torch\n@torch.no_grad()\ndef helper(x): return x" + _BUILD + "return helper(x)",
    "from typing import *\nT = TypeVar('T')\nclass R(Generic[T]):\n    def get(self): return 1" + _BUILD + "return R().get()",
    "from typing import *\nFn = Callable[[int], str]" + _BUILD + "return cast(Fn, x)",
    "_UNSET = object()" + _BUILD + "return x is _UNSET",
    "import logging, threading\nlog = logging.getLogger(__name__)\nlock = threading.Lock()" + _BUILD + "log.info(x)",
    "import functools\n@functools.lru_cache\ndef helper(x): return x" + _BUILD + "return helper(x)",
    "import contextlib\n@contextlib.contextmanager\ndef inside():\n    yield 1" + _BUILD + "with inside(): return x",
    "import abc\nclass A(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\nclass B(A):\n    def f(self): return 1"
    + _BUILD + "return B().f()",
    "import subprocess, argparse\nargs = argparse.Namespace(flags=['-O3'])" + _BUILD + "return subprocess.run(args.flags)",
]  # fmt: skip


@pytest.mark.parametrize("text", ORDINARY)
def test_an_ordinary_function_has_a_key(import_: Any, text: str) -> None:
    keys = {digest(import_(text, 0).build, 1) for _ in range(2)}
    assert len(keys) == 1
    assert isinstance(CacheKey.of("python", "x"), CacheKey)


def test_a_ufunc_that_holds_a_python_function_is_refused(import_: Any) -> None:
    text = f"import numpy\n{_CHOSEN}U = [numpy.add, numpy.frompyfunc(lambda x: N, 1, 1)][CHOICE]{_BUILD}return U"
    assert digest(import_(text, 0).build, 1)
    with pytest.raises(KeyFactorError, match="not NumPy's own"):
        digest(import_(text, 1).build, 1)


_LOOPS = [
    "n = NODE\n    while n: n = n.next\n    return n",
    "n = NODE\n    for _ in x: n = n.a or n.b or n.c or n.d or n.e or n.f or n.g\n    return n.h",
    "a, b = NODE, None\n    while a: b = a.x; a = b.y; b = a.z\n    return a, b",
]


@pytest.mark.parametrize("body", _LOOPS)
def test_a_name_that_walks_a_structure_has_an_end(import_: Any, body: str) -> None:
    text = f"class Node: pass\nNODE = Node()\nNODE.size = CHOICE{_BUILD}{body}"
    assert digest(import_(text, 0).build, 1) != digest(import_(text, 1).build, 1)


def test_code_that_is_not_imported_yet_uses_methods_of_objects_that_are_there(import_: Any, tmp_path: Path) -> None:
    (tmp_path / "hidden_late.py").write_text("def lower(value): return value.emit()\n")
    text = f"{_CHOSEN}class Op:\n    def emit(self): return N\nOP = Op(){_BUILD}"
    text += "from hidden_late import lower\n    return lower(OP)"
    assert digest(import_(text, 0).build, 1) != digest(import_(text, 1).build, 1)
    assert "hidden_late" not in sys.modules
