"""The C modules that Triton builds: their key is of their sources, flags and ABI, and not of the machine that builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from kcoord.backends.triton import adapter
from kcoord.backends.triton.request import Module
from tests.support.sandbox import Sandbox

_PROGRAM = """
import kcoord
kcoord.install()
from triton.runtime.build import compile_module_from_src

SOURCE = '''
#include <Python.h>
static PyObject *say(PyObject *self, PyObject *arguments) { return PyLong_FromLong(7); }
static PyMethodDef methods[] = {{"say", say, METH_NOARGS, NULL}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "answer", NULL, -1, methods};
PyMODINIT_FUNC PyInit_answer(void) { return PyModule_Create(&module); }'''
print(compile_module_from_src(SOURCE, "answer").say())
"""
_COMPILER = '#!/bin/sh\nexport PATH=/usr/bin:/bin\necho built >> "$0.log"\nexec gcc "$@"\n'


def test_a_module_is_built_once_for_images_with_and_without_the_program_file(sandbox: Sandbox) -> None:
    """Triton's own key has its answer. The image without it may have no compiler either."""
    compiler, bare = sandbox.root / "compiler", sandbox.root / "bare"
    compiler.write_text(_COMPILER)
    compiler.chmod(0o755)
    bare.mkdir()
    (bare / "file").write_text("#!/bin/sh\necho ELF 64-bit LSB executable\n")
    (bare / "file").chmod(0o755)
    for path in (str(bare), "/nowhere"):
        done = sandbox.run("-c", _PROGRAM, CC=str(compiler), PATH=path)
        assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
    assert Path(f"{compiler}.log").read_text() == "built\n"


BUILD: dict[str, Any] = {
    "src": b"int x;", "language": "c", "include_dirs": ["/usr/include/x"], "libraries": ["m"], "library_dirs": ["/lib"],
    "ccflags": ["-g"],
}  # fmt: skip


def _key(**changed: Any) -> str:
    return adapter.modules.key(Module("m.so", "triton's", Path("/cache"), {**BUILD, **changed})).digest


@pytest.mark.parametrize(
    "changed",
    [{"src": b"int y;"}, {"language": "c++"}, {"include_dirs": []}, {"libraries": ["n"]}, {"library_dirs": ["/lib64"]},
     {"ccflags": None}],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_each_part_of_a_build_is_in_its_key(changed: dict[str, Any]) -> None:
    assert _key(**changed) != _key()


def test_older_releases_build_from_text_and_know_fewer_flags() -> None:
    assert _key(src="int x;") == _key()
    assert adapter.modules.key(Module("m.so", "1", Path(), {"src": "int x;"})) == adapter.modules.key(
        Module("m.so", "2", Path(), {"src": "int x;", "ccflags": None, "libraries": []})
    )


def test_where_the_drivers_library_and_tritons_headers_lie_is_not_in_it() -> None:
    linked = {"libraries": ["libcuda.so.1"]}
    assert _key(**linked, library_dirs=["/usr/lib64"]) == _key(**linked, library_dirs=["/usr/local/cuda/stubs"])
    assert "site-packages" not in str(
        adapter.modules.key(Module("m.so", "1", Path(), {**BUILD, "include_dirs": [f"{adapter.PACKAGE}/include"]}))
    )


@pytest.mark.parametrize("linked", [{"libraries": ["foo"]}, {"ccflags": ["-lfoo"]}], ids=str)
def test_where_any_other_library_lies_is_in_it(linked: dict[str, list[str]]) -> None:
    assert _key(**linked, library_dirs=["/a"]) != _key(**linked, library_dirs=["/b"])


@pytest.mark.parametrize("fact", ["machine", "libc", "python"])
def test_a_module_of_another_abi_has_another_key(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = _key()
    abi = adapter.host_abi()
    monkeypatch.setattr(adapter, "host_abi", lambda: {**abi, fact: "another"})
    assert _key() != mine


@pytest.mark.parametrize("variable", ["CC", "CXX"])
def test_the_compiler_counts_by_its_text(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = _key()
    monkeypatch.setenv(variable, "/opt/another/cc -march=native")
    assert _key() != mine


def test_a_builder_of_the_projects_counts_by_content(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    def build(name: str, *arguments: Any) -> str:
        return name

    mine = _key()
    monkeypatch.setattr(knobs.build, "impl", build)
    assert _key() != mine


def test_a_module_whose_build_is_not_known_has_tritons_key() -> None:
    keys = {adapter.modules.key(Module("m.so", digest, Path())).digest for digest in ("1", "2")}
    assert len(keys) == 2
