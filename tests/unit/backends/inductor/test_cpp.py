"""Libraries that Inductor builds for the host: nobody opens one that is not complete."""

from __future__ import annotations

import ctypes
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from torch._inductor.cpp_builder import BuildOptionsBase, CppBuilder, get_cpp_compiler
from torch.utils._filelock import FileLock

from kcoord.backends.inductor import cpp
from tests.support.sandbox import Sandbox


def a_build(directory: Path, compiler: str = "", answer: int = 42) -> cpp.Build:
    """An object file and a library, as torch makes them."""
    directory.mkdir()
    source = directory / "unit.cpp"
    source.write_text(f'extern "C" int answer() {{ return {answer}; }}\n')
    how: dict[str, Any] = {"compiler": compiler or get_cpp_compiler(), "cflags": ["fPIC"]}
    options = BuildOptionsBase(**how, compile_only=True)
    first = CppBuilder("unit", str(source), options, str(directory))
    linker = CppBuilder(
        "unit", first.get_target_file_path(), BuildOptionsBase(**how, ldflags=["shared"]), str(directory)
    )
    return cpp.Build((first, linker), str(directory / "lock"))


def answer(library: Path) -> int:
    found: int = ctypes.CDLL(str(library)).answer()
    return found


def test_a_library_is_linked_elsewhere_and_nothing_half_written_is_at_its_place(tmp_path: Path) -> None:
    request, staging = a_build(tmp_path / "cache"), tmp_path / "staging"
    staging.mkdir()
    request.target.write_bytes(b"what a linker left that was killed")
    before = {path.name: path.stat().st_mtime_ns for path in request.target.parent.iterdir()}
    cpp.CppBackend().compile(request, staging)
    assert [path.name for path in staging.iterdir()] == ["library.so"]
    assert answer(staging / "library.so") == 42
    assert before == {path.name: path.stat().st_mtime_ns for path in request.target.parent.iterdir()}


def test_where_torch_cannot_build_elsewhere_it_builds_in_its_own_place(tmp_path: Path) -> None:
    """Its commands are split at spaces, whatever they are in."""
    request, staging = a_build(tmp_path / "cache"), tmp_path / "a user's directory"
    staging.mkdir()
    cpp.CppBackend().compile(request, staging)
    assert [path.name for path in staging.iterdir()] == ["library.so"]
    assert answer(staging / "library.so") == answer(request.target) == 42


def test_a_library_that_a_process_without_kcoord_links_is_waited_for(tmp_path: Path) -> None:
    request = a_build(tmp_path / "cache")
    found: list[bytes] = []

    def rank() -> None:
        cpp.build(request.lock, request.builders)
        found.append(request.target.read_bytes())

    with FileLock(request.lock):
        request.target.write_bytes(b"half")
        thread = threading.Thread(target=rank)
        thread.start()
        thread.join(0.5)
        assert not found
        request.target.write_bytes(b"half and half")
    thread.join()
    assert found == [b"half and half"]


def test_builders_of_another_torch_are_left_alone(tmp_path: Path) -> None:
    request = a_build(tmp_path / "cache")
    assert not cpp.CppBackend().bypass(request)
    del request.builders[0]._output
    assert "differ" in cpp.CppBackend().bypass(request)


def test_a_worker_is_told_which_header_it_may_precompile() -> None:
    header = cpp.precompile_later("prefix.h", "g++ i", vec_isa="AVX2")
    assert not header, "a builder leaves it out"
    assert pickle.loads(pickle.dumps(header)).asked == (("prefix.h", "g++ i"), {"vec_isa": "AVX2"})


def test_a_compiler_at_another_place_makes_no_other_key(tmp_path: Path) -> None:
    """Torch names its files by hashes of the compiler's path."""
    driver = Path(shutil.which("g++") or pytest.skip("no g++")).resolve()
    keys = []
    for name in ("one", "two"):
        (tmp_path / name / "bin").mkdir(parents=True)
        shutil.copy(driver, tmp_path / name / "bin" / "g++")
        for part in ("lib", "include"):
            (tmp_path / name / part).symlink_to(f"/usr/{part}")
        request = a_build(tmp_path / name / "cache", str(tmp_path / name / "bin" / "g++"))
        keys.append(cpp.CppBackend().key(request))
    assert keys[0] == keys[1]
    other = a_build(tmp_path / "other", str(tmp_path / "two" / "bin" / "g++"), 43)
    assert [found.name for found in keys[0].diff(cpp.CppBackend().key(other))] == ["sources"]


def test_a_source_that_vanished_is_torchs_error_and_none_of_kcoord(sandbox: Sandbox) -> None:
    """A cleaner of temporary directories took it."""
    program = """
import sys
from pathlib import Path
from kcoord.backends.inductor import cpp
from tests.unit.backends.inductor.test_cpp import a_build

request = a_build(Path(sys.argv[1]))
request.sources[0].unlink()
try:
    cpp.build(request.lock, request.builders)
except Exception as error:
    print(type(error).__name__)
"""
    root = str(Path(__file__).parents[4])
    done = sandbox.run("-c", program, sandbox.root / "cache", timeout=120, PYTHONPATH=root)
    assert (done.stdout, done.returncode) == ("CppCompileError\n", 0), done.stderr
    assert "unit.cpp" in done.stderr
    assert "please report it" not in done.stderr


NODE = r"""
import os, re, sys
directory, release, newer = sys.argv[1:]
os.confstr = lambda name: f"glibc {release}"
from pathlib import Path
import kcoord
from kcoord.backends.inductor import cpp
from tests.unit.backends.inductor.test_cpp import a_build, answer

def raised(self, request, staging, native=cpp.CppBackend.compile):
    done = native(self, request, staging)
    library = staging / "library.so"
    library.write_bytes(re.sub(rb"GLIBC_2(?=\.)", b"GLIBC_9", library.read_bytes()))
    return done

if newer:
    cpp.CppBackend.compile = raised
request = a_build(Path(directory))
request.sources[0].write_text('#include <cstdio>\nextern "C" int answer() { return std::puts("") < 0 ? 0 : 42; }\n')
cpp.build(request.lock, request.builders)
try:
    print("it answers", answer(request.target), end=", ")
except OSError as error:
    print("it does not load", end=", ")
print(int(kcoord.connect().counters.read()["compiles"]), "compiles")
"""


@pytest.mark.parametrize(
    ("newer", "first", "next_ones"),
    [
        ("", "it answers 42, 1 compiles", ["it answers 42, 0 compiles"] * 2),
        ("newer", "it does not load, 1 compiles", ["it answers 42, 1 compiles", "it answers 42, 0 compiles"]),
    ],
)
def test_hosts_of_other_c_libraries_share_a_library_that_they_can_open(
    sandbox: Sandbox, newer: str, first: str, next_ones: list[str]
) -> None:
    """One that they cannot open would end the job. `newer`: it needs a C library that no host has."""

    def node(name: str, release: str, newer: str = "") -> str:
        root = str(Path(__file__).parents[4])
        done = sandbox.run_forked("-c", NODE, sandbox.root / name, release, newer, PYTHONPATH=root)
        assert done.returncode == 0, done.stderr
        assert "kcoord" not in done.stderr
        return done.stdout.strip()

    assert node("builder", "2.99", newer) == first
    assert [node("old", "2.17"), node("other", "2.17")] == next_ones
    assert not list(sandbox.local.glob("objects/*/.kcoord/quarantine/*"))
