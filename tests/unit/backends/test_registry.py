"""The registry: compilers are found by name, and none is imported."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kcoord.backends import registry
from kcoord.backends.backend import Backend
from kcoord.backends.compiler import Compiler
from kcoord.backends.fail_open import notices
from kcoord.errors import KcoordError
from tests.support.sandbox import Sandbox


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers entry points, in place of those that are installed."""

    def register(**entries: str) -> None:
        found = [EntryPoint(name, value, registry.GROUP) for name, value in entries.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: found)
        registry.compilers.cache_clear()

    monkeypatch.setattr(notices, "_told", {})
    yield register
    registry.compilers.cache_clear()


class Other(Backend[Any, Any]):
    name = "other"

    def label(self, request: Any) -> str:
        return "kernel"

    def load(self, request: Any, artifact: Any) -> Any:
        return artifact


OTHER = Compiler("other", f"{__name__}:adapter")
adapter = Other()
BUILT_IN = list(registry.BUILT_IN)
HOOKED = [each.name for each in registry.compilers() if each.modules]


def test_a_compiler_of_another_package_is_one_of_them(registered: Any) -> None:
    registered(other=f"{__name__}:OTHER")
    assert [compiler.name for compiler in registry.compilers()] == [*BUILT_IN, "other"]
    assert registry.replayer("other") is adapter


@pytest.mark.parametrize(
    "value", ["no_such_module:COMPILER", f"{__name__}:Nothing", f"{__name__}:pytest", f"{__name__}:OTHER"]
)
def test_a_broken_one_is_named_once_and_left_alone(registered: Any, value: str) -> None:
    registered(broken=value)  # OTHER has another name
    for _ in range(2):
        assert [compiler.name for compiler in registry.compilers()] == BUILT_IN
        registry.compilers.cache_clear()
    (line,) = notices.since(0)[0]
    assert "'broken' is left alone" in line


def test_a_built_in_one_is_not_replaced(registered: Any) -> None:
    registered(triton=f"{__name__}:OTHER", python=f"{__name__}:OTHER")
    assert [compiler.name for compiler in registry.compilers()] == BUILT_IN


def test_each_declares_an_adapter_of_its_name_and_hooks() -> None:
    """They are imported without their compilers, but for Triton's."""
    pytest.importorskip("triton")
    for compiler in registry.compilers():
        if compiler.backend:
            module, _, attribute = compiler.backend.partition(":")
            assert getattr(importlib.import_module(module), attribute).name == compiler.name
        for hooks in compiler.modules.values():
            assert callable(importlib.import_module(hooks).hook)


HOOKED_MODULE = """
import importlib.util, inspect, pathlib, sys, threading
sys.path.insert(0, sys.argv[1])
from kcoord.backends import registry
for _ in range(2):
    registry._hook_once_imported("toy", "toy_hooks")
registry._hook_once_imported("toy", "toy_more")
assert importlib.util.find_spec("toy").loader.get_filename("toy").endswith("toy.py")
assert "toy_hooks" not in sys.modules, "looking for it imports nothing"
for attempt in range(2):
    try:
        import toy
    except ZeroDivisionError:
        pathlib.Path(sys.argv[1], "wrong").unlink()
assert toy.loaders == ("SourceFileLoader",) * 2, "its own loader is there while its code runs"
print(inspect.getsource(toy.compile).strip(), toy.hooked)
importlib.reload(toy)
print(toy.hooked)
"""


def test_a_module_is_hooked_once_after_its_first_import_that_succeeds(tmp_path: Path, sandbox: Sandbox) -> None:
    (tmp_path / "toy.py").write_text(
        "import pathlib, sys\n"
        "if pathlib.Path(__file__).with_name('wrong').exists(): 1 / 0\n"
        "hooked = globals().get('hooked', [])\n"
        "loaders = type(__loader__).__name__, type(__spec__.loader).__name__\n"
        "def compile(): pass\n"
    )
    (tmp_path / "wrong").touch()
    for name in ("toy_hooks", "toy_more"):
        (tmp_path / f"{name}.py").write_text(f"import toy\ndef hook(): toy.hooked.append({name!r})\n")
    done = sandbox.run("-c", HOOKED_MODULE, str(tmp_path))
    assert (done.stdout, done.stderr) == (
        "def compile(): pass ['toy_hooks', 'toy_more']\n['toy_hooks', 'toy_more']\n", ""
    )  # fmt: skip


def test_a_module_in_whose_import_kcoord_is_installed_is_hooked_at_its_end(tmp_path: Path, sandbox: Sandbox) -> None:
    """As a compiler's that imports torch, which installs kcoord. One that fails is hooked when it is imported again."""
    (tmp_path / "toy.py").write_text(
        "import pathlib\n"
        "from kcoord.backends import registry\n"
        "registry._hook_once_imported('toy', 'toy_hooks')\n"
        "if pathlib.Path(__file__).with_name('wrong').exists(): 1 / 0\n"
        "def compile(): pass\n"
    )
    (tmp_path / "wrong").touch()
    (tmp_path / "toy_hooks.py").write_text("import toy\ndef hook(): print('hooked', toy.compile.__name__)\n")
    program = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[1])\n"
        "try:\n    import toy\n"
        "except ZeroDivisionError:\n    pathlib.Path(sys.argv[1], 'wrong').unlink()\n"
        "import toy; print(type(toy.__spec__).__name__); import toy"
    )
    done = sandbox.run("-c", program, str(tmp_path))
    assert (done.stdout, done.stderr) == ("hooked compile\nModuleSpec\n", "")


def test_a_fault_of_a_hook_is_told_and_the_import_succeeds(tmp_path: Path, sandbox: Sandbox) -> None:
    (tmp_path / "toy.py").touch()
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from kcoord.backends import registry\n"
        "registry._hook_once_imported('toy', 'no_such_hooks'); import toy; print(toy.__name__)\n"
    )
    done = sandbox.run("-c", program, str(tmp_path))
    assert done.stdout == "toy\n"
    assert "please report it: ModuleNotFoundError: No module named 'no_such_hooks'" in done.stderr


def test_recipes_find_their_compiler_by_kind() -> None:
    found = {kind: registry.compiler_of(kind) for kind in ("triton", "python", "unknown")}
    assert {kind: compiler and compiler.name for kind, compiler in found.items()} == {
        "triton": "triton", "python": "python", "unknown": None,
    }  # fmt: skip
    assert registry.replayer("python").name == "python"
    with pytest.raises(KcoordError, match="no compiler here has recipes of the kind 'unknown'"):
        registry.replayer("unknown")


def test_installing_imports_no_compiler_and_no_adapter(sandbox: Sandbox) -> None:
    program = (
        "import sys, kcoord; print(kcoord.install())\n"
        "print([n for n in sys.modules if n in ('triton', 'torch') or n.endswith(('.adapter', '.hooks'))])"
    )
    assert sandbox.run("-c", program).stdout == f"{HOOKED}\n[]\n"
