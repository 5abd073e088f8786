"""Builders that run ninja in a directory of their own choice: tvm_ffi, FlashInfer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kcoord.artifacts.catalog import local_manifests
from tests.support.sandbox import Sandbox, finish

COUNTS = """
import json, sys
if sys.argv[1] != "stock":
    import kcoord
    kcoord.install()
import subprocess
runs, native = [], subprocess.run
def run(*arguments, **keywords):
    command = keywords.get("args") or arguments[0]
    runs.append(command[0] == "ninja" and "compdb" not in command)
    return native(*arguments, **keywords)
subprocess.run = run
"""

LOADS = (
    COUNTS
    + """
import tvm_ffi.cpp
module = tvm_ffi.cpp.load_inline("twice", cpp_sources=f"int twice(int x) {{ return {sys.argv[2]} * x; }}", functions=["twice"])
print(json.dumps({"value": module.twice(4), "builds": sum(runs)}))
"""
)

FLASHINFER = (
    COUNTS
    + """
from pathlib import Path
from flashinfer.jit.core import gen_jit_spec
module = gen_jit_spec("twice", [Path(sys.argv[2])]).build_and_load()
print(json.dumps({"value": module.twice(4), "builds": sum(runs)}))
"""
)
TWICE = """
#include <tvm/ffi/function.h>
int twice(int x) { return 2 * x; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(twice, twice);
"""


def start(sandbox: Sandbox, directory: str, kind: str = "shared", factor: int = 2) -> Any:
    return sandbox.fork("-c", LOADS, kind, str(factor), TVM_FFI_CACHE_DIR=str(sandbox.root / directory))


def outcome(process: Any) -> dict[str, Any]:
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert "please report it" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(find_spec("tvm_ffi") is None, reason="needs apache-tvm-ffi")
class TestTvmFfi:
    def test_nodes_with_directories_of_their_own_build_once(self, sandbox: Sandbox) -> None:
        """sglang#31347, tvm-ffi#667: nodes link the same library in place, in a directory whose lock holds on one host."""
        found = [outcome(each) for each in [start(sandbox, f"node{n}") for n in range(3)]]
        assert [each["value"] for each in found] == [8, 8, 8]
        assert sum(each["builds"] for each in found) == 1
        assert len(list(local_manifests(sandbox.local))) == 1

    def test_another_source_is_another_library(self, sandbox: Sandbox) -> None:
        assert outcome(start(sandbox, "one"))["value"] == 8
        assert outcome(start(sandbox, "one", factor=3)) == {"value": 12, "builds": 1}

    def test_a_library_that_is_there_already_is_not_written_again(self, sandbox: Sandbox) -> None:
        """Another rank may have it mapped, and on NFS its old pages would be gone."""
        outcome(start(sandbox, "one"))
        (library,) = (sandbox.root / "one").rglob("*.so")
        before = library.stat().st_ino
        assert outcome(start(sandbox, "one")) == {"value": 8, "builds": 0}
        assert library.stat().st_ino == before

    def test_a_build_that_fails_says_why_in_the_builders_words(self, sandbox: Sandbox) -> None:
        broken, place = LOADS.replace("return {", "return no_such_name + {"), str(sandbox.root / "one")
        done = finish(sandbox.fork("-c", broken, "shared", "2", TVM_FFI_CACHE_DIR=place))
        assert "ninja exited with status 1" in done.stderr
        assert "no_such_name" in done.stderr
        assert "please report it" not in done.stderr


@pytest.mark.skipif(find_spec("flashinfer") is None or shutil.which("nvcc") is None, reason="needs flashinfer and nvcc")
class TestFlashInfer:
    def test_ranks_with_workspaces_of_their_own_build_a_spec_once(self, sandbox: Sandbox) -> None:
        """flashinfer#3777: the lock of a spec holds on one host where the file system is NFS."""
        source = sandbox.root / "twice.cc"
        source.write_text(TWICE)
        found = [outcome(each) for each in [self.start(sandbox, source, f"rank{n}") for n in range(2)]]
        assert [each["value"] for each in found] == [8, 8]
        assert sum(each["builds"] for each in found) == 1
        for path in (sandbox.root / "rank0").rglob("*"):
            os.utime(path, (1, 1))  # flashinfer#3556: file systems change times, and each restart builds again
        assert outcome(self.start(sandbox, source, "rank0")) == {"value": 8, "builds": 0}
        source.write_text(TWICE.replace("2 *", "3 *"))
        assert outcome(self.start(sandbox, source, "rank0")) == {"value": 12, "builds": 1}

    def start(self, sandbox: Sandbox, source: Path, workspace: str) -> Any:
        stubs = sandbox.root / "stubs"
        stubs.mkdir(exist_ok=True)
        for name in () if any(stubs.iterdir()) else ("cuda", "cudart"):  # linked whether they are needed or not
            library = ["-shared", "-x", "c", "-", "-o", str(stubs / f"lib{name}.so")]
            subprocess.run(["gcc", *library], input="int stub;", text=True, check=True)
        flags = f"-Wl,--as-needed -L{stubs}"
        place = {"FLASHINFER_WORKSPACE_BASE": str(sandbox.root / workspace), "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
        return sandbox.start("-c", FLASHINFER, "shared", source, **place, FLASHINFER_EXTRA_LDFLAGS=flags)
