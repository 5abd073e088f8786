"""Whole files: which ones a function can reach, and whether their text is what runs."""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import kcoord
from kcoord.errors import KeyFactorError
from kcoord.keys.function import files as reached
from kcoord.keys.function.files import Files
from kcoord.keys.function.walk import content_of
from kcoord.keys.live_key import Declared, LiveKey
from tests.support.sandbox import Sandbox


class Project:
    """A directory of modules; those that a test imports are gone after it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, **texts: str) -> None:
        """``pkg__mod="…"`` is ``pkg/mod.py``, ``pkg____init__`` its package."""
        for name, text in texts.items():
            package, dunder, _ = name.partition("____init__")
            path = self.root / (f"{package}/__init__.py" if dunder else f"{name.replace('__', '/')}.py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()

    def files(self, **choices: Any) -> set[str]:
        return set(content_of(self.build(), files=Files(**choices)).files.digests)

    def build(self) -> Any:
        return importlib.import_module("subject").build

    def key(self, **declared: Any) -> kcoord.CacheKey:
        live = LiveKey(self.build(), Declared(scope=kcoord.Scope.TARGET, **declared), lambda: self.root / "local")
        return live.of((1,), {}).key


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("subject", "other"):  # other tests have such modules, too
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(sys.modules)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Project(tmp_path)
    for name in set(sys.modules) - before:
        del sys.modules[name]


_BUILD = "def build(x, *, staging=None): return x\n"


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ("import one", {"one"}),
        ("import one as other; import two", {"one", "two"}),
        ("from pkg import inner, other", {"pkg", "pkg.inner"}),
        ("from pkg import (  # these\n    inner,\n)", {"pkg", "pkg.inner"}),
        ("from pkg.inner import *", {"pkg", "pkg.inner"}),
        ("from pkg import *", {"pkg", "pkg.inner", "pkg.last"}),
        ("if False:\n    import one", {"one"}),
        ("from pkg \\\n    import inner", {"pkg", "pkg.inner"}),
        ("import importlib; importlib.import_module('one')", {"one"}),
        ("def unused():\n    from pkg import inner", {"pkg", "pkg.inner"}),
        ("import cycle", {"cycle", "subject"}),
        ("import json, numpy, not_there", set()),
    ],
)
def test_import_statements_are_found_in_the_text(project: Project, imports: str, expected: set[str]) -> None:
    project.write(one="", two="", pkg____init__="", pkg__inner="", pkg__last="", cycle="import subject\n")
    (project.root / "subject.py").write_text(f"try:\n    pass\nfinally:\n    pass\n{_BUILD}")
    build = project.build()
    project.write(subject=f"try:\n    pass\nfinally:\n    pass\n{_BUILD}\n{imports}\n")
    assert set(content_of(build, files=Files()).files.digests) == {"subject", *expected}
    assert not {"one", "two", "pkg", "cycle"} & sys.modules.keys(), "nothing is imported for a key"


def test_a_module_written_in_c_counts_by_its_content(project: Project) -> None:
    project.write(subject=f"{_BUILD}def later():\n    import native\n")
    native = project.root / f"native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    native.write_bytes(b"\x7fELF one")
    before = project.key()
    native.write_bytes(b"\x7fELF two")
    assert project.key().digest != before.digest


@pytest.mark.parametrize("ignored", ["one", "*/one.py", "o*"])
def test_files_that_are_ignored_do_not_count(project: Project, ignored: str) -> None:
    project.write(subject=f"{_BUILD}def later():\n    import one, two\n", one="", two="")
    assert project.files(ignored=(ignored,)) == {"subject", "two"}


def test_files_that_are_declared_count(project: Project) -> None:
    project.write(subject=_BUILD, data__table="N = 1\n", plugins____init__="", plugins__fast="N = 1\n")
    keys = []
    for _ in range(2):
        keys.append(
            [project.key(files=(each,)).digest for each in ("data/", "data/table.py", "plugins.*", "plugins.fast")]
        )
        project.write(data__table="N = 2\n", plugins__fast="N = 2\n")
    assert not set(keys[0]) & set(keys[1])


@pytest.mark.parametrize("missing", ["data/none.py", "no_such_module", "directory", "nothing.*"])
def test_a_declared_file_that_is_not_there_is_refused_with_its_name(project: Project, missing: str) -> None:
    project.write(subject=_BUILD, directory__file="")
    with pytest.raises(KeyFactorError, match=rf"files='{re.escape(missing)}': .*(name|write)"):
        project.key(files=(missing,))


_COMPUTED = (
    "import importlib\nNAME = 'plugin'\ndef build(x, *, staging=None):\n    return importlib.import_module(NAME)\n"
)


def test_an_import_of_a_computed_name_is_refused_unless_files_say_what_it_may_be(project: Project) -> None:
    project.write(subject=_COMPUTED, plugin="N = 1\n")
    with pytest.raises(KeyFactorError, match=r"^line 4 of subject\.build imports .*files=\[…\]"):
        project.key()
    before = project.key(files=("plugin",))
    project.write(plugin="N = 2\n")
    assert project.key(files=("plugin",)).digest != before.digest
    assert project.key(ignore=frozenset({"importlib.import_module"}))


def test_a_large_project_is_listed_by_packages(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reached, "_MOST_NAMED", 3)
    texts = {f"pkg__m{n}": f"from pkg import m{n + 1}\n" for n in range(5)}
    project.write(subject=f"{_BUILD}from pkg import m0\n", pkg____init__="", pkg__m5="", **texts)
    before = project.key()
    files = next(factor for factor in before.factors if factor.name == "files")
    assert [part.name for part in files.parts] == ["pkg.*", "subject"]
    del sys.modules["pkg.m5"], sys.modules["subject"]
    project.write(pkg__m5="edited = True\n")
    assert project.key().digest != before.digest


def test_a_project_of_too_many_files_is_refused_with_a_remedy(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reached, "_MOST_FILES", 2)
    project.write(subject=f"{_BUILD}import one, two\n", one="", two="")
    with pytest.raises(KeyFactorError, match=r"more than 2 files.*ignore_files"):
        project.key()


_EDITS = """
import kcoord, pathlib, other

@kcoord.compile_once(scope=kcoord.Scope.TARGET)
def build(*, staging):
    (staging / "kernel").write_text(str(other.helper()))

pathlib.Path(other.__file__).write_text("def helper(): return 22\\n")
artifact = build()
print((artifact.path / "kernel").read_text())
"""


def test_of_a_file_that_was_edited_since_its_import_nothing_is_published(sandbox: Sandbox) -> None:
    script, other = sandbox.root / "train.py", sandbox.root / "other.py"
    script.write_text(_EDITS)
    other.write_text("def helper(): return 1\n")
    done = sandbox.run_kcoord(script)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert not list(sandbox.local.rglob("kcoord-manifest.msgpack")), "another process would take it for the new text's"
    done = sandbox.run_kcoord(script)
    assert (done.returncode, done.stdout) == (0, "22\n"), done.stderr
    assert list(sandbox.local.rglob("kcoord-manifest.msgpack"))


_LATE = """
import kcoord, sys

@kcoord.compile_once(scope=kcoord.Scope.TARGET)
def build(x, *, staging):
    from late import helper
    (staging / "kernel").write_text(str(helper(x)))

keys = [build.key(3).digest]
build(3)
keys.append(build.key(3).digest)
build(3), build(4)
print(len(set(keys)), kcoord.connect().counters.read()["compiles"])
sys.modules["late"].N = 2
try:
    build(3)
except kcoord.GlobalsDrift as drift:
    print("drift", "late.N: 1 → 2" in str(drift))
"""


def test_a_module_that_the_compile_imports_leaves_the_key_as_it_was_and_is_watched(sandbox: Sandbox) -> None:
    (sandbox.root / "train.py").write_text(_LATE)
    (sandbox.root / "late.py").write_text("N = 1\ndef helper(x): return x + N\n")
    done = sandbox.run_kcoord(sandbox.root / "train.py")
    assert done.stdout == "1 2\ndrift True\n", done.stderr


def test_a_file_of_after_the_start_of_the_process_is_compared_with_what_its_module_runs(project: Project) -> None:
    project.write(subject=f"import other\n{_BUILD}", other="class Kind:\n    def size(self): return 1\n")
    build = project.build()
    assert not content_of(build, files=Files()).files.edited
    project.write(other="class Kind:\n    def size(self): return 2\n")
    assert content_of(build, files=Files()).files.edited == str(project.root / "other.py")
    old = time.time() - 10 * 24 * 3600
    os.utime(project.root / "other.py", (old, old))
    assert content_of(build, files=Files()).files.edited, "its inode changed all the same"


def test_a_file_that_is_read_is_not_kept_in_memory(project: Project) -> None:
    """A rank may reach thousands."""
    project.write(subject=f"{_BUILD}import large\n", large=f"TEXT = {'x' * 1_000_000!r}\n")
    gc.collect()
    tracemalloc.start()
    try:
        files = content_of(project.build(), files=Files()).files
        sys.modules["large"].TEXT = ""
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 500_000
        assert "large" in files.digests
    finally:
        tracemalloc.stop()
