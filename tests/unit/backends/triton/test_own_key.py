"""Triton's key of itself: always Triton's own value, hashed once per machine; and Triton's tools, by content."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton
import triton.compiler.compiler
import triton.runtime.autotuner
import triton.runtime.cache

from kcoord.backends import reliances
from kcoord.backends.fail_open import notices
from kcoord.backends.triton import own_key as triton_key
from kcoord.backends.triton import version_of
from kcoord.backends.triton.own_key import hook
from kcoord.backends.triton.tools import tool_factors, triton_tools
from kcoord.keys.tools import machine_cache
from tests.support.sandbox import eventually

_HOME: Any = next(m for m in (triton.runtime.cache, triton.compiler.compiler) if hasattr(m, "triton_key"))


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Triton's function, in its places; whatever a test puts there is taken away again."""
    found: Any = getattr(_HOME.triton_key, "__kcoord_stock__", _HOME.triton_key)
    for module in (_HOME, triton.runtime.autotuner):
        if hasattr(module, "triton_key"):
            monkeypatch.setattr(module, "triton_key", found)
    found.cache_clear()
    yield found
    found.cache_clear()


@pytest.fixture
def old_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of which a change must show, however young they are."""
    monkeypatch.setattr(machine_cache, "_RACY", -1)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


class Package:
    """A small package in Triton's place, with a key that reads it and counts how often."""

    def __init__(self, root: Path) -> None:
        self.root, self.calls = root, 0
        for name in ("compiler/compiler.py", "language/core.py", "_C/libtriton.so"):
            (root / name).parent.mkdir(parents=True)
            (root / name).write_text(name)

    def key(self) -> str:
        self.calls += 1
        files = sorted(p for p in self.root.rglob("*") if p.is_file())
        return hashlib.sha256(b"".join(p.read_bytes() for p in files)).hexdigest()

    def once(self, local: Path) -> str:
        return triton_key.once(self.key, self.root, local)


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path / "triton")


def test_the_kept_value_is_triton_s_own(stock: Any, local: Path) -> None:
    expected = stock()
    stock.cache_clear()
    for _ in range(2):  # computed; kept
        hook(local)
        assert _HOME.triton_key() == expected
        assert _HOME.triton_key is not stock
        _HOME.triton_key.cache_clear()
    assert list((local / "toolchain").glob("triton-*[0-9a-f]"))


def test_a_process_in_which_triton_has_hashed_itself_looks_at_no_file_again(stock: Any, local: Path) -> None:
    stock()
    hook(local)
    assert _HOME.triton_key is stock


def test_it_is_replaced_wherever_it_was_imported_to(
    stock: Callable[[], str], local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_s = types.ModuleType("torch._inductor.runtime.triton_compat")
    torch_s.triton_key = stock  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, torch_s.__name__, torch_s)
    hook(local)
    replaced = _HOME.triton_key
    assert torch_s.triton_key is replaced  # type: ignore[attr-defined]
    assert getattr(triton.runtime.autotuner, "triton_key", replaced) is replaced
    torch_s.triton_key = stock  # type: ignore[attr-defined] # imported before, but seen only now
    hook(local)
    assert _HOME.triton_key is replaced, "idempotent"
    assert torch_s.triton_key is replaced  # type: ignore[attr-defined]


def test_it_can_be_cleared_and_unwrapped_like_the_stock_one(stock: Callable[[], str], local: Path) -> None:
    hook(local)
    replaced = _HOME.triton_key
    assert replaced.__name__ == "triton_key"
    assert inspect.unwrap(replaced) is inspect.unwrap(stock)
    replaced()
    assert replaced.cache_info().currsize == 1
    replaced.cache_clear()
    assert replaced.cache_info().currsize == 0


def test_a_stand_in_is_left_alone(stock: Callable[[], str], local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says would be kept for every process of the machine."""

    def stand_in() -> str:
        return "made up"

    monkeypatch.setattr(_HOME, "triton_key", stand_in)
    hook(local)
    assert _HOME.triton_key is stand_in


def test_whatever_goes_wrong_the_stock_function_answers(
    stock: Callable[[], str], local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_told", {})
    monkeypatch.setattr(triton_key, "cached", lambda *args: 1 / 0)
    hook(local)
    assert _HOME.triton_key() == stock()
    assert len(notices.since(0)[0]) == 1


@pytest.mark.usefixtures("old_files")
def test_the_second_process_computes_nothing(package: Package, local: Path) -> None:
    first = package.once(local)
    assert first == package.key()
    package.calls = 0
    assert package.once(local) == first
    assert package.calls == 0


_CHANGES: dict[str, Callable[[Path], object]] = {
    "a file of the compiler": lambda r: (r / "compiler/compiler.py").write_text("changed"),
    "a library, its size and mtime as before": lambda r: _same_size_and_time(r / "_C/libtriton.so"),
}


def _same_size_and_time(path: Path) -> None:
    found = path.stat()
    path.write_text(path.read_text().upper())
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.usefixtures("old_files")
@pytest.mark.parametrize("what", _CHANGES)
def test_a_change_of_triton_on_disk_gives_the_value_of_now(package: Package, local: Path, what: str) -> None:
    before = package.once(local)
    eventually(lambda: time.time_ns() > (package.root / "_C/libtriton.so").stat().st_ctime_ns + 20_000_000)
    _CHANGES[what](package.root)
    after = package.once(local)
    assert before != after == package.key()


@pytest.mark.usefixtures("old_files")
def test_another_version_in_memory_has_another_entry(
    package: Package, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that was imported enters the key, and the one on disk may be newer."""
    package.once(local)
    monkeypatch.setattr(triton, "__version__", "0.0.1")
    package.once(local)
    assert package.calls == 2


def test_a_young_package_is_not_kept(package: Package, local: Path) -> None:
    for calls in (1, 2):
        package.once(local)
        assert package.calls == calls


def test_stock_s_own_memory_of_an_earlier_state_is_not_kept(local: Path, tmp_path: Path) -> None:
    """A value from before an upgrade, under the stamps from after it, would be wrong for every later process."""
    calls: list[int] = []

    def compute() -> str:
        calls.append(1)
        return f"state {len(calls)}"

    stock = functools.lru_cache(compute)
    assert stock() == "state 1"
    assert triton_key._kept(stock, local)() == "state 2"


_IMPORTS = """
import json, sys
import triton
import triton.runtime.cache, triton.compiler.compiler
before = set(sys.modules)
home = next(m for m in (triton.runtime.cache, triton.compiler.compiler) if hasattr(m, "triton_key"))
home.triton_key()
print(json.dumps(sorted(m for m in set(sys.modules) - before if m.startswith("triton"))))
"""


def test_the_stock_walk_imports_nothing_that_triton_has_not_imported() -> None:
    """A kept value does not walk. Should a later Triton fail here, what its walk imports must be imported, too."""
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


# Tools.


Factors = Callable[..., dict[str, Any]]


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """A package with tools, small ones, as Triton's is."""
    for name in ("nvidia/bin/ptxas", "nvidia/lib/libdevice.10.bc", "amd/lib/ocml.bc"):
        path = tmp_path / "triton" / "backends" / name
        path.parent.mkdir(parents=True)
        path.write_text(name)
    return tmp_path / "triton" / "backends"


@pytest.fixture
def factors(shipped: Path, local: Path) -> Factors:
    return lambda backend="cuda": tool_factors(local, backend, shipped.parent)


def test_the_tools_of_a_backend_are_those_that_it_ships(shipped: Path, factors: Factors) -> None:
    assert list(factors()) == ["ptxas", "libdevice.10.bc"]
    assert list(factors("hip")) == ["ocml.bc"]
    assert {"ptxas", "libdevice.10.bc", "ocml.bc"} <= factors(None).keys()
    for name in ("nvidia/lib/libdevice.10.bc", "amd/lib/ocml.bc"):
        before = factors(None)
        (shipped / name).write_text("another")
        after = factors(None)
        assert [label for label in before if before[label] != after[label]] == [Path(name).name]


def test_every_tool_that_this_triton_runs_is_among_them() -> None:
    knobs: Any = triton.knobs
    paths = set(map(os.path.realpath, triton_tools("cuda").values()))
    for name in ("ptxas", "ptxas_blackwell"):
        if hasattr(type(knobs.nvidia), name):
            assert os.path.realpath(getattr(knobs.nvidia, name).path) in paths
    for backend, target in (("cuda", ("cuda", 90, 32)), ("hip", ("hip", "gfx942", 64))):
        from triton.backends.compiler import GPUTarget

        options = triton.compiler.make_backend(GPUTarget(*target)).parse_options({"enable_fp_fusion": True})
        known = set(triton_tools(backend).values())
        assert {path for _, path in options.extern_libs} <= known


def test_what_the_environment_chooses_counts_by_content_and_not_by_place(
    factors: Factors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = factors()
    found = []
    for place, text in (("one", "same"), ("two", "same"), ("three", "other")):
        (tmp_path / place).mkdir()
        (tmp_path / place / f"ptxas-{place}").write_text(text)
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / place / f"ptxas-{place}"))
        found.append(factors())
    assert found[0] == found[1] != found[2] != plain
    (tmp_path / "three" / "ptxas-three").write_text("same")
    assert factors() == found[0], "replaced in the process"
    monkeypatch.delenv("TRITON_PTXAS_PATH")
    assert factors() == plain


def test_a_chosen_tool_that_is_missing_leaves_the_shipped_one(
    factors: Factors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Triton falls back."""
    plain = factors()
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "missing"))
    assert factors() == plain
    (tmp_path / "missing").write_text("appears")
    assert factors() != plain


def test_plug_ins_count_by_content(factors: Factors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.so", "b.so"):
        (tmp_path / name).write_text(name)
    monkeypatch.setenv("TRITON_PLUGIN_PATHS", f"{tmp_path}/a.so{os.pathsep}{tmp_path}/b.so")
    before = factors()
    (tmp_path / "b.so").write_text("another")
    after = factors()
    assert [label for label in before if before[label] != after[label]] == ["TRITON_PLUGIN_PATHS.1"]


@pytest.mark.parametrize("backend", ["nvidia", "amd"])
def test_a_release_without_hashes_of_libraries_is_told_unless_its_keys_never_had_them(
    local: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """AMD's backend has none before Triton 3.9, also where no AMD GPU is."""
    compiler = importlib.import_module(f"triton.backends.{backend}.compiler")
    monkeypatch.delattr(compiler, "file_hash", raising=False)
    monkeypatch.setattr(reliances, "asides", {})
    triton_key.hook_libraries(local)
    is_told = backend == "nvidia" or version_of(triton.__version__) >= (3, 9)
    assert (("triton", "hashes of libraries") in reliances.asides) is is_told
