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
from kcoord.keys.function import function_factors

_ROOT = Path(__file__).parents[1]

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
    from kcoord.keys.function import function_factors
    print(CacheKey.of("python", "build", **function_factors(build)).digest)


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


@pytest.mark.parametrize("first", ["consts", "parts.layers", "late", "json, functools", "parts, consts, late"])
def test_the_order_of_imports_does_not_matter(project: Path, digest: str, first: str) -> None:
    assert run(project, "-c", f"import {first}\nimport subject; subject.main()") == digest


def test_a_second_key_in_one_process_is_the_first(project: Path, digest: str) -> None:
    assert run(project, "-c", "import subject; subject.main(); subject.main()") == f"{digest}\n{digest}"


def test_reading_a_value_for_the_first_time_in_mid_process_does_not_matter(project: Path, digest: str) -> None:
    """The function imports ``late`` when it runs: before and after that it is the same function."""
    assert run(project, "-c", "import subject; subject.c.FLAGS['fast']; import late; subject.main()") == digest


def _pythons() -> list[str]:
    found = {}
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(10, 15):
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
    return CacheKey.of("python", "build", **function_factors(function)).digest  # type: ignore[arg-type]


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
