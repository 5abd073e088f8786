"""A function imports modules when it runs. Its key is made before: of their text, and nothing of them runs."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from pathlib import Path

import pytest

from kcoord.keys import CacheKey
from kcoord.keys.function.walk import content_of
from tests.support.sandbox import Sandbox

_numbers = itertools.count()


class Project:
    """Modules on `sys.path`, of which none is imported but the subject, and those that a test imports."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root, self._monkeypatch = root, monkeypatch
        self._path = list(sys.path)

    def subject(self, text: str, **files: str) -> types.ModuleType:
        """Import `text` as a module. `files` are others, ``pkg__late`` in a package; those of an earlier call are gone."""
        directory = self._root / f"version{next(_numbers)}"
        for name, content in {"subject": text, **files}.items():
            path = directory / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        for name in [
            n for n in sys.modules if n.partition(".")[0] in {f.partition("__")[0] for f in ("subject", *files)}
        ]:
            self._monkeypatch.delitem(sys.modules, name)
        self._monkeypatch.setattr(sys, "path", [str(directory), *self._path])
        importlib.invalidate_caches()
        return importlib.import_module("subject")

    def key(self, text: str, **files: str) -> str:
        return key(self.subject(text, **files))


def key(subject: types.ModuleType) -> str:
    return CacheKey.of("python", "build", **content_of(subject.build).factors()).digest


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Project(tmp_path, monkeypatch)


IMPORTS = "def build(x):\n    from late import helper\n    return helper(x)\n"
PLAIN = "from consts import N\nLIMIT = 3\ndef helper(x: int, k=2) -> int:\n    return x * k + N + LIMIT\n"
CLASSES = (
    "import consts\nclass Layer:\n    size = consts.N\n    def helper(self, x): return x + 1\nhelper = Layer().helper\n"
)
DECORATED = "from consts import times\n@times(2)\ndef helper(x): return x\n"
CALLS = "from consts import *\nTABLE = {}\ndef helper(x): return TABLE['n'] + x\nTABLE['n'] = N\n"
EITHER = "try:\n    from fast import helper\nexcept ImportError:\n    from slow import helper\n"
ENVIRONMENT = "import os\nclass A: pass\ndef helper(x): return os.environ.get('LATE_FLAG')\n"


@pytest.mark.parametrize(
    ("files", "edited", "edit"),
    [
        ({"late": PLAIN, "consts": "N = 1\n"}, "late", ("x * k", "x / k")),
        ({"late": PLAIN, "consts": "N = 1\n"}, "late", ("LIMIT = 3", "LIMIT = 4")),
        ({"late": PLAIN, "consts": "N = 1\n"}, "late", ("k=2", "k=3")),
        ({"late": PLAIN, "consts": "N = 1\n"}, "consts", ("N = 1", "N = 2")),
        ({"late": PLAIN, "consts": "N = len('a')\n"}, "consts", ("'a'", "'ab'")),
        ({"late": CLASSES, "consts": "N = 1\n"}, "late", ("x + 1", "x + 2")),
        ({"late": CLASSES, "consts": "N = 1\n"}, "consts", ("N = 1", "N = 2")),
        ({"late": DECORATED, "consts": "def times(k): return lambda f: lambda x: k * f(x)\n"}, "late", ("times(2)", "times(3)")),
        ({"late": DECORATED, "consts": "def times(k): return lambda f: lambda x: k * f(x)\n"}, "consts", ("k * f", "k + f")),
        ({"late": CALLS, "consts": "N = 1\n"}, "late", ("+ x", "- x")),
        ({"late": CALLS, "consts": "N = 1\n"}, "consts", ("N = 1", "N = 2")),
        ({"late": EITHER, "fast": "def helper(x): return x + 1\n", "slow": "def helper(x): return x\n"}, "fast", ("+ 1", "+ 2")),
        ({"late": EITHER, "fast": "def helper(x): return x + 1\n", "slow": "def helper(x): return x\n"}, "slow", ("x\n", "-x\n")),
        ({"late": "not Python: helper\n"}, "late", ("helper", "helpers")),
        ({"late": "from consts import helper\nhelper.k = 1\n", "consts": "def helper(x): return x\n"}, "late", ("k = 1", "k = 2"))
    ],
)  # fmt: skip
def test_what_is_imported_later_counts(
    project: Project, files: dict[str, str], edited: str, edit: tuple[str, str]
) -> None:
    before = project.key(IMPORTS, **files)
    assert project.key(IMPORTS, **files) == before
    assert edit[0] in files[edited]
    assert project.key(IMPORTS, **{**files, edited: files[edited].replace(*edit)}) != before
    assert not {"late", *files} & sys.modules.keys()


@pytest.mark.parametrize("text", [
    "def build(x):\n    import pkg.late\n    return pkg.late.helper(x)\n",
    "def build(x):\n    from pkg import late\n    return late.helper(x)\n",
    "def build(x):\n    import pkg.late as other\n    return other.helper(x)\n",
    "import pkg\ndef build(x):\n    import pkg.late\n    return pkg.late.helper(x)\n",
    "def build(x):\n    import pkg.late\n    return [pkg.late]\n",
])  # fmt: skip
@pytest.mark.parametrize("package", ["", "class A: pass\n"], ids=["empty package", "package"])
def test_a_module_of_a_package_is_found(project: Project, text: str, package: str) -> None:
    files = {"pkg____init__": package, "pkg__late": "def helper(x): return x + 1\n"}
    before = project.key(text, **files)
    assert project.key(text, **{**files, "pkg__late": "def helper(x): return x + 2\n"}) != before
    assert "pkg.late" not in sys.modules


def test_a_namespace_package_is_found(project: Project) -> None:
    text = "def build(x):\n    from outer.inner.late import helper\n    return helper(x)\n"
    before = project.key(text, outer__inner__late="def helper(x): return x + 1\n")
    assert project.key(text, outer__inner__late="def helper(x): return x + 2\n") != before


@pytest.mark.parametrize("late", [
    "from config import TILE\ndef helper(x): return x + TILE\n",
    "import config\ndef helper(x): return x + config.TILE\n",
    "import config\nclass A: pass\ndef helper(x): return x + config.TILE\n",
    "import config\nHALF = config.TILE // 2\ndef helper(x): return x + HALF\n",
    "from config import TILE\ndef deco(f): return f\n@deco\ndef helper(x): return x + TILE\n",
    "from config import *\ndef helper(x): return x + TILE\n",
])  # fmt: skip
def test_a_value_that_the_script_has_set_before_the_import_counts(project: Project, late: str) -> None:
    """``config.TILE = arguments.tile``, and the function imports later what reads it."""
    subject = project.subject(f"import config\n{IMPORTS}", late=late, config="TILE = 32\n")
    before = key(subject)
    subject.config.TILE = 64
    assert key(subject) != before


def test_a_variable_that_a_module_reads_counts_before_its_import(project: Project) -> None:
    assert content_of(project.subject(IMPORTS, late=ENVIRONMENT).build).variables == {"LATE_FLAG"}


def test_values_of_functions_that_are_not_called_do_not_count(project: Project) -> None:
    """They may be this rank's number, or a counter."""
    late = "import state\nclass A: pass\ndef helper(x): return x\ndef other(): return state.rank\n"
    subject = project.subject(f"import state\n{IMPORTS}", late=late, state="rank = 0\n")
    before = key(subject)
    subject.state.rank = 1
    assert key(subject) == before


RUNS = """
import kcoord, sys, pathlib

@kcoord.compile_once(scope=kcoord.Scope.TARGET)
def build(x, *, staging):
    if x is None:
        import never
        import package.never
        from never import this
        return this(never, package.never)
    from late import Layer
    (staging / "kernel").write_text(str(Layer(x).size))

for _ in range(2):
    print((build(3).path / "kernel").read_text())
print(build(4).path.exists(), *[n for n in sys.modules if "never" in n])
"""
NEVER = "import pathlib, sys, time\npathlib.Path(sys.argv[0] + '.ran').touch()\n"


@pytest.mark.parametrize("never", ["sys.exit(3)\n", "time.sleep(1000)\n", "raise KeyboardInterrupt\n", "1 +\n"])
def test_the_modules_of_a_branch_that_is_never_taken_are_not_imported(sandbox: Sandbox, never: str) -> None:
    script, package = sandbox.root / "train.py", sandbox.root / "package"
    package.mkdir()
    script.write_text(RUNS)
    for directory in (sandbox.root, package):
        (directory / "never.py").write_text(NEVER + never)
    (sandbox.root / "late.py").write_text("class Layer:\n    def __init__(self, x): self.size = 2 * x\n")
    done = sandbox.run_kcoord(script)
    assert (done.returncode, done.stdout) == (0, "6\n6\nTrue\n"), done.stderr
    assert not Path(f"{script}.ran").exists()
    assert "drift" not in done.stderr.lower()


@pytest.mark.parametrize("more", ["", "class A: pass\n"], ids=["plain", "not plain"])
def test_a_module_that_is_edited_before_it_is_imported_is_a_drift(sandbox: Sandbox, more: str) -> None:
    """Its function was given a key of the old text, and compiles the new one: nothing of that is published."""
    script, late = sandbox.root / "train.py", sandbox.root / "late.py"
    late.write_text(f"{more}SIZE = 1\n")
    edited = f"{more}SIZE = 2\n"
    script.write_text(
        "import kcoord, pathlib\n@kcoord.compile_once(scope=kcoord.Scope.TARGET)\ndef build(*, staging):\n"
        f"    pathlib.Path({str(late)!r}).write_text({edited!r})\n    from late import SIZE\n"
        "    (staging / 'kernel').write_text(str(SIZE))\nbuild()\n"
    )
    done = sandbox.run_kcoord(script)
    assert "GlobalsDrift" in done.stderr
