"""New nodes with a warm store: they compile nothing, and need no compiler where a toolchain is borrowed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import KCOORD, as_json, kcoord
from tests.support.sandbox import Sandbox, sandboxed

pytest.importorskip("torch")
pytest.importorskip("setuptools")  # torch's probes need it


class Node:
    """A machine of its own, as far as files go, with the store that all of them share."""

    def __init__(self, box: Sandbox, name: str, path: str) -> None:
        self.box, self.root = box, box.root / name
        for directory in ("home", "tmp"):
            (self.root / directory).mkdir(parents=True)
        self.variables = {
            "KCOORD_STORE": str(box.root / "store"),
            "KCOORD_LOCAL_DIR": str(self.root / "local"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.root / "inductor"),
            "TORCH_EXTENSIONS_DIR": str(self.root / "extensions"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "HOME": str(self.root / "home"),
            "TMPDIR": str(self.root / "tmp"),
            "XDG_CACHE_HOME": None,
            "PATH": path,
        }

    def run(self, *arguments: str, **more: str | None) -> tuple[str, str]:
        """What a Python program prints, and what is said beside it."""
        done = self.box.run(*arguments, timeout=300, **{**self.variables, **more})
        assert done.returncode == 0, done.stderr
        assert "please report it" not in done.stderr
        return done.stdout, done.stderr

    @property
    def compiles(self) -> list[str]:
        """Runs of the g++ of `counting` that were more than questions."""
        lines = (self.root / "tmp" / "asked").read_text().splitlines()
        return [line for line in lines if not line.startswith(("-v", "--version", "-dump", "-print"))]


def counting(box: Sandbox) -> str:
    """A PATH whose g++ notes each run in the node's temporary directory."""
    gxx = box.root / "bin" / "g++"
    gxx.parent.mkdir()
    gxx.write_text(f'#!/bin/sh\necho "$@" >> "$TMPDIR/asked"\nexec {shutil.which("g++")} "$@"\n')
    gxx.chmod(0o755)
    return f"{gxx.parent}:{os.environ['PATH']}"


ROWS = '''
import subprocess
import kcoord
kcoord.install()

@kcoord.compile_once(scope=kcoord.Scope.TARGET, tools=["gcc"], ignore=["subprocess"])
def built(text, *, staging):
    (staging / "made.c").write_text(text)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", staging / "made.so", staging / "made.c"], check=True)

print(len((built("int f(void) { return 3; }").path / "made.so").read_bytes()))
import torch

@torch.compile
def softened(x):
    return (x.sin() * 2).softmax(-1)

print(float(softened(torch.ones(8, 8)).sum()))
from torch._inductor import cpu_vec_isa
print(*cpu_vec_isa.valid_vec_isa_list())
from torch.utils import cpp_extension
ADDED = """
#include <pybind11/pybind11.h>
int f(int x) { return x + 1; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) { module.def("f", f); }
"""
print(cpp_extension.load_inline("added", ADDED, no_implicit_headers=True).f(1))  # torch's headers take half a minute
'''
TOLERANT = """
import subprocess, sys
import kcoord

@kcoord.compile_once(scope=kcoord.Scope.TARGET, tools=["gcc"], ignore=["subprocess"])
def built(text, *, staging):
    done = subprocess.run(["gcc", "-dumpversion" if text == "asked" else text], capture_output=True, text=True)
    (staging / "made").write_text(f"{done.returncode} {done.stdout}{done.stderr}")

print((built(sys.argv[1]).path / "made").read_text())
"""
NEWER = """
import re, subprocess
import kcoord

@kcoord.compile_once(scope=kcoord.Scope.TARGET, tools=["gcc"], ignore=["subprocess", "re"])
def newer(*, staging):
    done = subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", staging / "made.so", "-Wl,--no-as-needed", "-lm"])
    if done.returncode == 0:
        made = (staging / "made.so").read_bytes()
        (staging / "made.so").write_bytes(re.sub(rb"GLIBC_2(?=\\.)", b"GLIBC_9", made))
    (staging / "status").write_text(str(done.returncode))

print((newer().path / "status").read_text())
"""
KERNEL = """
import kcoord
kcoord.install()
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

@triton.jit
def ones(out, N: tl.constexpr):
    tl.store(out + tl.arange(0, N), 1.0)

signature = {"out": "*fp32", "N": "constexpr"}
source = triton.compiler.ASTSource(fn=ones, signature=signature, constexprs={(1,): 16})
triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(kcoord.connect().counters.read()["compiles"])
"""
EXEC = ("-m", "kcoord", "exec", "--", sys.executable, "-c")


def slim(box: Sandbox, name: str = "slim") -> str:
    """A PATH of Python, ninja and coreutils, without compilers."""
    bin = box.root / name
    bin.mkdir()
    for program in ("ninja", "cat", "ls", "mkdir", "rm", "uname", "which", "env", "sh"):
        if found := shutil.which(program):
            (bin / program).symlink_to(found)
    (bin / "python").symlink_to(sys.executable)
    return str(bin)


def toolchains(node: Node) -> list[dict[str, Any]]:
    """Those that the store has."""
    found: list[dict[str, Any]] = as_json(node.box, "toolchain", "ls", **node.variables)
    return found


@pytest.mark.timeout(600)
def test_a_new_node_with_a_warm_store_runs_no_compiler_and_needs_none_where_it_is_borrowed(sandbox: Sandbox) -> None:
    """A node that builds has torch's header precompiled once, and reads it, as without kcoord."""
    if shutil.which("ninja") is None:
        pytest.skip("no ninja")
    path = counting(sandbox)
    builder, second, consumer = (
        Node(sandbox, "builder", path),
        Node(sandbox, "second", path),
        Node(sandbox, "consumer", slim(sandbox)),
    )
    made, _ = builder.run(*EXEC, ROWS)
    assert len([line for line in builder.compiles if "-x c++-header" in line]) == 1
    assert any("-include" in line and "-x c++-header" not in line for line in builder.compiles)
    (recorded,) = toolchains(builder)
    assert recorded["artifacts"] >= 3
    assert {"gcc", "g++"} <= recorded["tools"].keys()
    loaded, said = consumer.run(*EXEC, ROWS, KCOORD_TOOLCHAIN=recorded["digest"][:12])
    assert loaded == made
    assert " 0 compiled, " in said
    assert second.run("-c", ROWS)[0] == made
    assert second.compiles == []


@pytest.fixture(scope="module")
def builder() -> Iterator[Node]:
    """A node with compilers, which has asked them something; their toolchain is called ``ours``."""
    with sandboxed() as box:
        node = Node(box, "builder", os.environ["PATH"])
        node.run(*EXEC, TOLERANT, "asked")
        kcoord(box, "toolchain", "name", toolchains(node)[0]["digest"], "ours", **node.variables)
        yield node


def test_without_the_variable_the_launcher_names_what_is_missing_and_the_toolchain_that_would_do(builder: Node) -> None:
    _, said = Node(builder.box, "unset", slim(builder.box, "unset-bin")).run(*EXEC, "pass")
    assert "no compiler of C and C++ is on PATH; the store's artifacts of one load with KCOORD_TOOLCHAIN=ours" in said


def test_a_borrowed_compiler_answers_and_what_a_function_makes_do_with_is_not_published(builder: Node) -> None:
    consumer = Node(builder.box, "borrows", slim(builder.box, "borrows-bin"))
    made, said = consumer.run(*EXEC, TOLERANT, "unheard.c", KCOORD_TOOLCHAIN="ours")
    assert made.startswith("127 gcc is borrowed")
    assert "gcc is borrowed, and the store has no built" in said
    made, _ = builder.run(*EXEC, TOLERANT, "unheard.c")
    assert "borrowed" not in made


def test_a_kernel_for_newer_libraries_than_a_host_has_is_not_loaded_and_the_line_says_so(builder: Node) -> None:
    """Which compilers of its own would build again there."""
    assert builder.run(*EXEC, NEWER)[0] == "0\n"
    consumer = Node(builder.box, "older", slim(builder.box, "older-bin"))
    made, said = consumer.run(*EXEC, NEWER, KCOORD_TOOLCHAIN="ours")
    assert made == "127\n"
    assert "gcc is borrowed, and the store has one newer, for other libraries than this host's" in said


def test_stubs_in_an_image_answer_as_recorded_and_compile_nothing(builder: Node) -> None:
    image, path = builder.box.root / "image", slim(builder.box, "image-bin")

    def install(*roles: str) -> set[str]:
        made = as_json(builder.box, "toolchain", "install", "ours", str(image), *roles, **builder.variables)
        return set(made["stubs"])

    assert install("--role", "C++") >= {"g++"}
    assert not (image / "gcc").exists()
    assert install() >= {"gcc", "g++"}
    asked = [subprocess.run([each, "--version"], capture_output=True) for each in (image / "gcc", shutil.which("gcc"))]
    assert asked[0].stdout == asked[1].stdout
    done = subprocess.run([image / "gcc", "unit.c"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (127, 1)
    loaded, said = Node(builder.box, "of-image", f"{path}:{image}").run(
        "-c", TOLERANT, "asked"
    )  # no launcher, no variable
    assert loaded == builder.run("-c", TOLERANT, "asked")[0]
    assert "is borrowed" not in said


def test_a_compiler_that_is_there_is_used_and_no_stub_hides_it_and_what_either_made_is_withdrawn(builder: Node) -> None:
    """The last one: it withdraws what the others load."""
    own = Path(slim(builder.box, "own-bin")) / "gcc"
    own.write_text("#!/bin/sh\necho 'gcc (ours) 99.1'\n")
    own.chmod(0o755)
    elsewhere = Node(builder.box, "elsewhere", str(own.parent))
    made, _ = elsewhere.run(*EXEC, TOLERANT, "--version", KCOORD_TOOLCHAIN="ours")
    assert "99.1" in made
    assert builder.run(*EXEC, TOLERANT, "--version")[0] != made
    assert not list((elsewhere.root / "local" / "borrowed").glob("*/bin/cc"))

    def artifacts() -> dict[str, int]:
        return {each["tools"]["gcc"]: each["artifacts"] for each in toolchains(builder)}

    (real,) = artifacts().keys() - {"99.1"}
    before = artifacts()
    assert (before[real] > 0, before["99.1"]) == (True, 1)
    kcoord(builder.box, "gc", "--compiler", "gcc==99.1", **builder.variables)
    assert artifacts() == {real: before[real], "99.1": 0}
    (digest,) = (each["digest"] for each in toolchains(builder) if each["names"] == ["ours"])
    kcoord(builder.box, "gc", "--toolchain", digest, **builder.variables)
    assert artifacts() == {real: 0, "99.1": 0}


def test_what_a_release_of_a_package_has_made_is_withdrawn_and_compiled_again(sandbox: Sandbox) -> None:
    triton = pytest.importorskip("triton").__version__
    node, program = Node(sandbox, "node", os.environ["PATH"]), sandbox.root / "kernel.py"
    program.write_text(KERNEL)

    def withdraw(release: str) -> int:
        return sandbox.run_kcoord(*KCOORD, "gc", "--compiler", f"triton=={release}", **node.variables).returncode

    assert node.run(program)[0] == "1\n"
    assert (withdraw(f"{triton}.1"), node.run(program)[0]) == (1, "0\n")
    assert (withdraw(triton), node.run(program)[0]) == (0, "1\n")
