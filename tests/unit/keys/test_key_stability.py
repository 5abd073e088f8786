"""One function, one key: whatever the process, the directory, the order of imports and the version of Python."""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.keys import CacheKey
from kcoord.keys.function.walk import content_of

_ROOT = Path(__file__).parents[3]

_FILES = {
    "subject.py": '''
import consts as c
from parts import helper, layers
from parts.layers import Layer, Scaled

TILE = 64
NAMES = {"a", "b", "c", "d", "e", "f"}
TABLE = {"one": 1, "two": 2.0, "three": (True, None)}
make = Scaled(3)


def twice(x, *, k=TILE):
    return [helper(y) * k for y in x]


def build(config, x, *, staging):
    """Reads values, modules, classes, objects and closures."""
    def inner(y):
        return y * c.DEPTH + layers.WIDTH
    if c.FLAGS["fast"] and "a" in NAMES:
        return twice(x), inner(TABLE["one"]), Layer(2).size(), make.scaled(4)
    import late
    try:
        return late.finish(x)
    except ValueError:
        return f"{x!r:>{TILE}}"


def main():
    import json, sys
    from kcoord.keys import CacheKey
    from kcoord.keys.function.files import Files
    from kcoord.keys.function.walk import content_of
    print(CacheKey.of("python", "build", **content_of(build, files=Files()).factors()).digest)


if __name__ == "__main__":
    main()
''',
    "consts.py": "DEPTH = 3\nFLAGS = {'fast': True, 'wide': False}\nUNUSED = object()\n",
    "late.py": "LIMIT = 9\ndef finish(x):\n    return [y for y in x if y < LIMIT]\n",
    "parts/__init__.py": "from parts.layers import WIDTH\ndef helper(x):\n    return x + WIDTH\n",
    "parts/layers.py": '''
import functools
WIDTH = 128
class Layer:
    factor = 2
    def __init__(self, n): self.n = n
    def size(self): return self.n * self.factor * self._more()
    def _more(self): return WIDTH
    @property
    def area(self): return self.size() ** 2
    @staticmethod
    def none(): return 0
class Scaled(Layer):
    factor = 3
    def _more(self): return super()._more() + 1
    def scaled(self, k): return functools.partial(pow, k)(self.n) + self.area
''',
}  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    for name, text in _FILES.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


def run(project: Path, *arguments: str, python: str = sys.executable, cwd: Path | None = None, seed: str = "0") -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": f"{project}:{_ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [python, *arguments]
    done = subprocess.run(command, env=environment, cwd=cwd or project, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


_IMPORTED = ("-c", "import subject; subject.main()")


@pytest.fixture(scope="module")
def digest(project: Path) -> str:
    return run(project, *_IMPORTED)


@pytest.mark.parametrize("seed", ["1", "2", "77", "random"])
def test_the_hash_seed_does_not_matter(project: Path, digest: str, seed: str) -> None:
    assert run(project, *_IMPORTED, seed=seed) == digest


def test_the_working_directory_does_not_matter(project: Path, digest: str, tmp_path: Path) -> None:
    assert run(project, *_IMPORTED, cwd=tmp_path) == digest


def test_the_place_of_the_project_does_not_matter(project: Path, digest: str, tmp_path: Path) -> None:
    shutil.copytree(project, tmp_path / "elsewhere")
    assert run(tmp_path / "elsewhere", *_IMPORTED) == digest


@pytest.mark.parametrize("how", [("subject.py",), ("-m", "subject")], ids=["script", "-m"])
def test_a_script_and_a_module_are_the_same_code(project: Path, digest: str, how: tuple[str, ...]) -> None:
    assert run(project, *how) == digest


@pytest.mark.parametrize("name", ["train-gpt.py", "7b.py", "class.py"])
def test_a_scripts_name_need_be_no_name_of_pythons(project: Path, digest: str, name: str) -> None:
    shutil.copy(project / "subject.py", project / name)
    assert len(run(project, name)) == len(digest)


@pytest.mark.parametrize("first", ["consts", "parts.layers", "json, functools", "parts, consts"])
def test_the_order_of_imports_does_not_matter(project: Path, digest: str, first: str) -> None:
    assert run(project, "-c", f"import {first}\nimport subject; subject.main()") == digest


def test_a_second_key_in_one_process_is_the_first(project: Path, digest: str) -> None:
    assert run(project, "-c", "import subject; subject.main(); subject.main()") == f"{digest}\n{digest}"


def _pythons() -> list[str]:
    found = {}
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(11, 15):
        if sys.version_info[1] == minor:
            continue
        candidates = [shutil.which(f"python3.{minor}"), *sorted(versions.glob(f"3.{minor}.*/bin/python"))]
        for candidate in filter(None, candidates):
            if subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
                found[minor] = str(candidate)
    return list(found.values())


def test_the_version_of_python_does_not_matter_where_there_is_source(project: Path, digest: str) -> None:
    pythons = _pythons()
    if not pythons:
        pytest.skip("no other Python of 3.10 or newer is here")
    assert {p: run(project, *_IMPORTED, python=p) for p in pythons} == dict.fromkeys(pythons, digest)


_STATEMENTS = [
    "A = 1",
    "B = [1, 2.0, True, None]",
    "C = {'x': 1, 'y': {'z': (1, 2)}}",
    "D = frozenset({'p', 'q', 'r'})",
    "def helper(x): return x + A + other(x)",
    "def other(x): return x * len(B)",
    "def recursive(n): return n and helper(recursive(n - 1))",
    "class Thing:\n    size = 4\n    def area(self): return self.size * other(1)",
    "import math",
    "def build(x): return helper(x), C['y'], D, Thing().area(), recursive(x), math.pi",
]


@functools.cache
def _digest_in_order(order: tuple[int, ...], swapped: bool) -> str:
    """The key of `build` in a module whose statements, dictionaries and sets were made in another order."""
    namespace: dict[str, object] = {"__name__": "shuffled"}
    for n in order:
        text = _STATEMENTS[n]
        if swapped:
            text = text.replace("{'x': 1, 'y': {'z': (1, 2)}}", "{'y': {'z': (1, 2)}, 'x': 1}")
            text = text.replace("{'p', 'q', 'r'}", "{'r', 'q', 'p'}")
        exec(compile(text, "<shuffled>", "exec"), namespace)
    function = namespace["build"]
    return CacheKey.of("python", "build", **content_of(function).factors()).digest  # type: ignore[arg-type]


@settings(max_examples=1000, deadline=None)
@given(st.permutations(range(len(_STATEMENTS))), st.booleans())
def test_a_thousand_orders_of_definition_give_one_key(order: list[int], swapped: bool) -> None:
    assert _digest_in_order(tuple(order), swapped) == _digest_in_order(tuple(range(len(_STATEMENTS))), False)


def test_the_orders_would_be_told_apart_if_a_value_differed() -> None:
    reference = _digest_in_order(tuple(range(len(_STATEMENTS))), False)
    for text, other in itertools.pairwise(("A = 1", "A = 2", "A = True", "A = 1.0")):
        place = _STATEMENTS.index(text) if text in _STATEMENTS else 0
        _STATEMENTS[place], kept = other, _STATEMENTS[place]
        try:
            _digest_in_order.cache_clear()
            shuffled = random.Random(3).sample(range(len(_STATEMENTS)), len(_STATEMENTS))
            assert _digest_in_order(tuple(shuffled), True) != reference
        finally:
            _STATEMENTS[place] = kept
            _digest_in_order.cache_clear()


_PACKAGES = {
    "wheeled/__init__.py": "__version__ = '1'\ndef helper(x): return x\n",
    "wheeled-1.dist-info/RECORD": "wheeled/__init__.py,sha256=abc,1\n../../../bin/tool,sha256={place},2\n",
    "other_name/__init__.py": "VERSION = 1\n",
    "Another-3.dist-info/RECORD": "other_name/__init__.py,sha256=def,1\n",
    "unrecorded/__init__.py": "__version__ = '1'\n",
    "unrecorded/inner/deep.py": "N = 1\n",
}
_USES_THEM = """
import sys
sys.path.insert(0, __file__.removesuffix("subject.py") + "site-packages")
from kcoord.keys import CacheKey
from kcoord.keys.function.files import Files
from kcoord.keys.function.walk import content_of


def build(x):
    import wheeled, other_name, unrecorded
    return wheeled.helper(x), other_name.VERSION, unrecorded.__version__


def main():
    print(CacheKey.of("python", "build", **content_of(build, files=Files()).factors()).digest)
"""


def _with_packages(project: Path) -> Path:
    """A project that uses packages which are installed beside it."""
    for name, text in _PACKAGES.items():
        path = project / "site-packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{place}", project.name))
    (project / "subject.py").write_text(_USES_THEM)
    return project


def test_where_a_package_is_installed_does_not_matter(tmp_path: Path) -> None:
    """A package's scripts begin with the path of their interpreter, and its record holds their hashes."""
    assert len({run(_with_packages(tmp_path / place), *_IMPORTED) for place in ("one", "two")}) == 1


@pytest.mark.parametrize("first", ["wheeled", "other_name", "unrecorded"])
def test_whether_an_installed_package_is_imported_already_does_not_matter(tmp_path: Path, first: str) -> None:
    project = _with_packages(tmp_path)
    imported = run(project, "-c", f"import subject\nimport {first}\nsubject.main()")
    assert run(project, *_IMPORTED) == imported


@pytest.mark.parametrize("changed", [name for name in _PACKAGES if name != "wheeled/__init__.py"])
def test_another_installed_package_is_another_key(tmp_path: Path, changed: str) -> None:
    """What has a record counts by that, and what has none by its files."""
    project = _with_packages(tmp_path)
    before = run(project, *_IMPORTED)
    file = project / "site-packages" / changed
    file.write_text(file.read_text().replace("sha256=", "sha256=0").replace("1", "12", 1))
    assert (run(project, *_IMPORTED) == before) == (changed == "other_name/__init__.py")


_GENERATED = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers

DEVICE = {device}
FACTOR = {factor}


@triton.jit
def triton_poi_fused_0(x):
    tl.store(x, triton_helpers.maximum(tl.load(x), FACTOR))
"""


def test_on_which_gpu_of_its_node_inductor_made_a_kernel_does_not_matter(tmp_path: Path) -> None:
    """It names the kernel's module by the hash of a file that says so: else each rank would compile for itself."""
    pytest.importorskip("triton")
    tasks = pytest.importorskip("torch._inductor.runtime.compile_tasks")

    def key(device: int, factor: int = 2) -> str:
        file = tmp_path / f"made{device}.py"
        file.write_text(_GENERATED.format(device=device, factor=factor))
        made = tasks._reload_python_module(f"c{device}", str(file), set_sys_modules=False)
        return CacheKey.of("triton", "inputs", **content_of(made.triton_poi_fused_0).factors()).digest

    assert key(0) == key(1)
    assert key(0, factor=3) != key(1)
