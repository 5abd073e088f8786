"""A compile function's key: what it says, never where it lives in memory."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import logging
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kcoord.errors import KeyFactorError
from kcoord.keys import CacheKey
from kcoord.keys.function.files import Files
from kcoord.keys.function.namespaces import names_in_class
from kcoord.keys.function.walk import content_of

_ROOT = Path(__file__).parents[3]
_numbers = itertools.count()


class Workshop:
    """Modules written to disk and imported under one name, so that only their content can make keys differ."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self._monkeypatch = root, monkeypatch

    def module(self, name: str = "subject", **sources: str) -> types.ModuleType:
        """Import `name`; `sources` are modules and their text. Modules of an earlier call are gone."""
        directory = self._root / f"version{next(_numbers)}"
        directory.mkdir()
        for module, text in sources.items():
            (directory / f"{module}.py").write_text(text)
            sys.modules.pop(module, None)
        importlib.invalidate_caches()
        with self._monkeypatch.context() as context:
            context.syspath_prepend(str(directory))
            return importlib.import_module(name)

    def digest(self, ignore: tuple[str, ...] = (), **sources: str) -> str:
        return digest(self.module(**sources).build, ignore)


def digest(function: Any, ignore: tuple[str, ...] = ()) -> str:
    return CacheKey.of("python", "build", **content_of(function, frozenset(ignore), files=Files()).factors()).digest


def digest_of_texts(function: Any) -> str:
    """As of a Triton kernel: functions count one by one."""
    return CacheKey.of("python", "build", **content_of(function).factors()).digest


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    for name in ("subject", "other"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Workshop(tmp_path, monkeypatch)
    for name in ("subject", "other"):
        sys.modules.pop(name, None)


_BASE = "def build(x):\n    return x + 1\n"

# (what, one text, another text): the keys differ; tests/stale has the rest
_CHANGES = [
    ("annotation's value", "N = 1\ndef build(x: N): return x\n", "N = 2\ndef build(x: N): return x\n"),
    ("annotation's type", "T = int\ndef build(x: T): return x\n", "T = float\ndef build(x: T): return x\n"),
    ("helper's annotation", "T = int\ndef helper(x: T): return x\ndef build(x): return helper(x)\n",
     "T = bool\ndef helper(x: T): return x\ndef build(x): return helper(x)\n"),
    ("closures swapped",
     "def make(n):\n    def f(): return n\n    return f\na, b = make(1), make(2)\ndef build(x): return a() - b()\n",
     "def make(n):\n    def f(): return n\n    return f\nb, a = make(1), make(2)\ndef build(x): return a() - b()\n"),
    ("a module's version", "import types\nm = types.ModuleType('m'); m.__version__ = '1'\ndef build(x): return x, m\n",
     "import types\nm = types.ModuleType('m'); m.__version__ = '2'\ndef build(x): return x, m\n"),
    ("mutual recursion, far end",
     "def a(n): return b(n - 1)\ndef b(n): return a(n) + 1\ndef build(x): return a(x)\n",
     "def a(n): return b(n - 1)\ndef b(n): return a(n) + 2\ndef build(x): return a(x)\n"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "one", "other"), _CHANGES, ids=[c[0] for c in _CHANGES])
def test_a_change_that_changes_what_is_compiled_changes_the_key(
    workshop: Workshop, what: str, one: str, other: str
) -> None:
    first = workshop.digest(subject=one)
    assert workshop.digest(subject=other) != first, what
    assert workshop.digest(subject=one) == first, "and back again"


@pytest.mark.parametrize("more", ["UNUSED = 3\n", "def unrelated(): pass\n", "# a comment\n"])
def test_a_change_elsewhere_in_the_file_changes_the_key_but_not_that_of_the_texts(
    workshop: Workshop, more: str
) -> None:
    keys, texts = [], []
    for text in (_BASE, _BASE + more):
        module = workshop.module(subject=text)
        keys.append(digest(module.build))
        texts.append(digest_of_texts(module.build))
    assert keys[0] != keys[1]
    assert texts[0] == texts[1]


def test_a_file_edited_after_its_import_does_not_lend_its_text_to_the_old_code(workshop: Workshop) -> None:
    """The old process still runs the old code: under the new file's key it would poison the cache."""
    module = workshop.module(subject=_BASE)
    new_text = "def build(x):\n    return x + 222\n"
    Path(str(module.__file__)).write_text(new_text)
    old_code = digest(module.build)
    assert workshop.digest(subject=new_text) != old_code


def test_equal_code_of_an_edited_file_lends_its_bytecode_to_no_other(workshop: Workshop) -> None:
    fresh = workshop.digest(subject=_BASE)
    module = workshop.module(subject=_BASE)
    Path(str(module.__file__)).write_text("edited = True\n")
    assert digest(module.build) != fresh
    assert workshop.digest(subject=_BASE) == fresh


def test_an_edited_annotation_changes_the_key_though_the_code_is_equal(workshop: Workshop) -> None:
    """As in a notebook: a compiler may read annotations, of which bytecode has nothing."""
    one = workshop.module(subject="def build(x: 'float32'):\n    return x + 1\n").build
    other = workshop.module(subject="def build(x: 'float16'):\n    return x + 1\n").build
    assert one.__code__ == other.__code__
    assert digest(one) != digest(other)


def test_an_annotation_that_is_a_string_counts_where_there_is_no_text() -> None:
    made: list[dict[str, Any]] = [{"__name__": "made"} for _ in range(2)]
    for namespace, what in zip(made, ("float32", "float16"), strict=True):
        exec(f"def build(x: '{what}'): return x", namespace)
    assert digest(made[0]["build"]) != digest(made[1]["build"])


def test_an_annotation_without_identity_counts_by_its_text_and_refuses_nothing(workshop: Workshop) -> None:
    text = "class Opaque: pass\nlog = Opaque()\ndef build(x: log, y: list[int], z: int | None) -> None: return x\n"
    assert workshop.digest(subject=text) == workshop.digest(subject=text)


_OPAQUE = "import threading\nlog = threading.local()\ndef build(x):\n    print(log)\n    return x\n"


def test_a_global_without_identity_is_refused_with_its_name_and_a_remedy(workshop: Workshop) -> None:
    module = workshop.module(subject=_OPAQUE)
    with pytest.raises(KeyFactorError) as caught:
        content_of(module.build).factors()
    line = str(caught.value)
    assert "globals subject.log" in line
    assert "ignore=" in line
    assert "\n" not in line


def test_a_closure_value_without_identity_is_refused() -> None:
    opaque = threading.local()

    def build() -> object:
        return opaque

    with pytest.raises(KeyFactorError, match=r"closure .*build.*\.opaque"):
        content_of(build).factors()


def test_ignoring_reaches_the_helpers(workshop: Workshop) -> None:
    text = _OPAQUE.replace("def build", "def helper") + "def build(x): return helper(x)\n"
    workshop.digest(ignore=("log",), subject=text)


_LOGGER = logging.getLogger("a logger has no identity")


def test_a_decorator_that_holds_something_opaque_is_no_obstacle() -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        logger = _LOGGER

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            logger.debug("%s", args)
            return function(*args)

        return call

    @logged
    def build(x: int) -> int:
        return x

    assert digest(build) == digest(build)


def test_a_compile_function_may_use_another_compile_function() -> None:
    import kcoord

    @kcoord.compile_once(scope=kcoord.Scope.TARGET)
    def part(n: int, *, staging: Path) -> None:
        (staging / "part").write_text(str(n))

    def build(n: int) -> Any:
        return part(n)

    factors = content_of(build).factors()
    assert any(name.endswith("part") for name in factors["code"])
    assert not any(name.startswith("kcoord.") for name in factors["code"]), "kcoord's own code compiles nothing"


_ELSEWHERE = """
import sys
from kcoord.keys import CacheKey
from kcoord.keys.function.walk import content_of
namespace = {"__name__": "made"}
exec('''
NAMES = {"a", "b", "c", "d", "e"}
def helper(x): return x in {"p", "q", "r", "s", "t"} or x in NAMES
def build(x, *, mode="fast"):
    def inner(): return ..., 1.5, b"y", ("t", None)
    try: return helper(x), inner()
    except ValueError: return build(x)
''', namespace)
print(CacheKey.of("python", "build", **content_of(namespace["build"]).factors()).digest)
"""


def test_a_function_without_a_source_file_has_one_key_in_all_processes() -> None:
    digests = set()
    for seed in ("0", "1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(_ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", _ELSEWHERE], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout)
    assert len(digests) == 1


def test_two_functions_without_source_files_differ_by_their_code() -> None:
    def made(text: str) -> Callable[..., Any]:
        namespace: dict[str, Any] = {"__name__": "made"}
        exec(text, namespace)
        return namespace["build"]  # type: ignore[no-any-return]

    texts = [
        "def build(x): return x + 1",
        "def build(x): return x + 2",
        "def build(x): return x - 1",
        "def build(x): return x.a",
        "def build(x): return x.b",
        "def build(x): return (lambda: 1)",
        "def build(x): return (lambda: 2)",
        "def build(x): return {1, 2}.union(x)",
    ]
    assert len({digest(made(t)) for t in texts}) == len(texts)


def test_code_of_no_module_is_the_projects(workshop: Workshop) -> None:
    text = "space = {}\nexec('def helper(): return 1\\nclass Kind: size = 1', space)\n"
    text += "helper, Kind = space['helper'], space['Kind']\ndef build(x): return helper(), Kind().size\n"
    one = workshop.digest(subject=text)
    assert workshop.digest(subject=text.replace("return 1", "return 2")) != one
    assert workshop.digest(subject=text.replace("size = 1", "size = 2")) != one


def test_a_module_says_a_name_that_is_missing_without_an_error(workshop: Workshop) -> None:
    other = "def __getattr__(name): raise AttributeError(name)\n"
    subject = "import other\ndef build(x):\n    try: return other.there\n    except AttributeError: return x\n"
    assert workshop.digest(subject=subject, other=other) == workshop.digest(subject=subject, other=other)


def test_a_module_that_is_a_value_counts_by_what_its_author_wrote(workshop: Workshop) -> None:
    subject = "import other\ndef build(x):\n    m = [other]\n    return m[0]\n"
    texts = ["K = 1\n", "K = 2\n", "def f(): return 1\n", "def f(): return 2\n", "class C: n = 1\n", "class C: n = 2\n"]
    texts += ["__version__ = '1'\n", "'''A docstring.'''\nK = 1\n"]
    assert len({workshop.digest(subject=subject, other=t) for t in texts}) == len(texts)


_TABLES = """
import numpy, torch
array, tensor = numpy.array([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
def make(held):
    def build(x, n=array): return held, tensor, n
    return build
build = make([array])
"""


def test_arrays_and_tensors_that_code_holds_count_by_content(workshop: Workshop) -> None:
    module = workshop.module(subject=_TABLES)
    before = digest(module.build)
    module.array[1] = 3
    changed = digest(module.build)
    module.array[1] = 2
    assert digest(module.build) == before != changed
    module.tensor[0] = 7
    assert digest(module.build) not in (before, changed)


@pytest.mark.parametrize(
    "made", ["numpy.zeros(1 << 25)", "numpy.array([None])", "torch.zeros(3, device='meta')", "torch.eye(3).to_sparse()"]
)
def test_one_that_cannot_be_read_at_each_call_is_refused_with_a_remedy(workshop: Workshop, made: str) -> None:
    module = workshop.module(subject=f"import numpy, torch\ntable = {made}\ndef build(x): return x, table\n")
    with pytest.raises(KeyFactorError, match=r"globals subject\.table.*pass it as an argument"):
        content_of(module.build).factors()


def test_an_object_whose_installed_class_calls_its_methods_counts_by_its_own(workshop: Workshop) -> None:
    text = "import torch\nclass Net(torch.nn.Module):\n    scale = 1\n    def forward(self, x): return self.scale + self.shift\n"
    text += "net = Net()\nnet.shift = 1\ndef build(x): return net(x)\n"
    changed = [
        text.replace("scale = 1", "scale = 2"),
        text.replace("shift = 1", "shift = 2"),
        text.replace(" + ", " - "),
    ]
    assert len({workshop.digest(subject=t) for t in (text, *changed)}) == 4


def test_a_chain_of_calls_may_be_longer_than_pythons_stack(workshop: Workshop) -> None:
    text = "".join(f"def f{n}(x): return f{n + 1}(x)\n" for n in range(1500))
    text += "def f1500(x): return x + 1\ndef build(x): return f0(x)\n"
    one = workshop.digest(subject=text)
    assert workshop.digest(subject=text.replace("x + 1", "x + 2")) != one


def test_a_wrapper_that_wraps_itself_has_a_key(workshop: Workshop) -> None:
    text = "def helper(): return 1\nhelper.__wrapped__ = helper\ndef build(x): return helper()\n"
    assert workshop.digest(subject=text) != workshop.digest(subject=text.replace("return 1", "return 2"))


_SPAWNED = """
import multiprocessing, sys
from kcoord.keys import CacheKey
from kcoord.keys.function.walk import content_of
class Kind: size = 1
N = 3
def build(x): return Kind, N
def key(_): return CacheKey.of("python", "build", **content_of(build).factors()).digest
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(key(0) == pool.map(key, [0])[0])
"""


def test_a_spawned_child_has_the_keys_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SPAWNED)
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr


_KINDS = """
import dataclasses, enum, typing
@dataclasses.dataclass(frozen=True, order=True, slots=True)
class Tile:
    m: int = 1
    def size(self): return self.m
class Mode(enum.Flag):
    FAST = 1
    def size(self): return 1
class Shape(typing.NamedTuple):
    m: int
    def size(self): return self.m
"""


@pytest.mark.parametrize("name", ["Tile", "Mode", "Shape"])
def test_methods_that_python_makes_do_not_count(workshop: Workshop, name: str) -> None:
    """Each version of Python makes others."""
    kind = getattr(workshop.module(subject=_KINDS), name)
    functions = {n for n in names_in_class(kind) if callable(getattr(kind, n))}
    assert functions == {"size"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("m: int = 1", "m: int = 2"),
        ("m: int = 1", "m: list = dataclasses.field(default_factory=lambda: [1])"),
        ("order=True", "order=False"),
        ("FAST = 1", "FAST = 2"),
    ],
)
def test_what_they_are_made_of_counts(workshop: Workshop, one: str, other: str) -> None:
    text = _KINDS + "def build(x): return Tile(), Mode\n"
    assert workshop.digest(subject=text) != workshop.digest(subject=text.replace(one, other))


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_a_module_that_cannot_be_imported_here_is_no_obstacle(workshop: Workshop, error: str) -> None:
    """Another vendor's, say: the function would not come there."""
    text = "def build(x):\n    if x is None:\n        import other\n        other.helper()\n    return x\n"
    assert workshop.digest(subject=text, other=f"raise {error}('no such library')\n")


def test_a_descriptor_that_makes_its_value_anew_each_time_is_no_change(workshop: Workshop) -> None:
    """Else each call would read everything again."""
    subject = workshop.module(
        subject="class Big:\n    def __get__(self, value, owner): return F * 1000 + 7\n"
        "class Config:\n    tile = Big()\nF, config = 3, Config()\ndef build(x): return config.tile\n"
    )
    unchanged = content_of(subject.build).watch.unchanged()
    assert unchanged()
    subject.F = 4
    assert not unchanged()


def test_a_value_whose_class_fails_to_describe_it_counts_as_changed(workshop: Workshop) -> None:
    """A launch asks; what is wrong with it is told where the key is made."""
    subject = workshop.module(
        subject="class Config:\n    def __cache_signature__(self): return os.stat(FILE).st_size\n"
        "import os\nFILE, config = __file__, Config()\ndef build(x): return config\n"
    )
    unchanged = content_of(subject.build).watch.unchanged()
    assert unchanged()
    subject.FILE = "/there/is/no/such/file"
    assert not unchanged()


_CONFIG = """
import threading
class Config:
    def size(self): return self.inner.tile * 2
config, other = Config(), Config()
config.inner, config.inner.tile = Config(), 1
other.me = other
local = threading.local()
"""


def test_a_class_counts_the_same_after_one_of_its_objects_was_copied() -> None:
    class Shape:
        tile = 1

    before = names_in_class(Shape)
    copy.copy(Shape())
    assert "__slotnames__" in vars(Shape)
    assert names_in_class(Shape) == before == ["tile"]


def test_a_value_whose_attributes_cannot_all_be_told_is_refused(workshop: Workshop) -> None:
    with pytest.raises(KeyFactorError, match="has no identity"):
        content_of(workshop.module(subject=_CONFIG).local)


def test_an_object_that_refers_to_itself_counts_by_the_way_back(workshop: Workshop) -> None:
    text = "class Node:\n    pass\na, b = Node(), Node()\na.next, b.next = b, {}\ndef build(): return a\n"
    assert workshop.digest(subject=text.format("a")) != workshop.digest(subject=text.format("b"))
