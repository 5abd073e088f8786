"""The identity of the installed CuTe DSL. Needs none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kcoord.backends.cutedsl import adapter


def record(site: Path, distribution: str, content: str) -> None:
    info = site / f"{distribution}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "RECORD").write_text(content)


def packages(monkeypatch: pytest.MonkeyPatch, site: Path) -> tuple[str, ...]:
    root = site / "nvidia_cutlass_dsl" / "dsl_packages" / "cutlass"
    monkeypatch.setitem(sys.modules, "cutlass", SimpleNamespace(__file__=str(root / "__init__.py")))  # type: ignore[arg-type]
    return adapter.packages.__wrapped__()


def test_it_holds_each_distribution_and_what_its_installer_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record(tmp_path, "nvidia_cutlass_dsl-4.8.1", "")
    record(tmp_path, "nvidia_cutlass_dsl_libs_cu12-4.8.1", "a.so,sha256=1,5\na.pyc,sha256=2,5\n")
    record(tmp_path, "another-1.0", "b.py,sha256=1,5\n")
    first = packages(monkeypatch, tmp_path)
    assert [each.split()[0] for each in first] == ["nvidia_cutlass_dsl", "nvidia_cutlass_dsl_libs_cu12"]
    record(tmp_path, "nvidia_cutlass_dsl_libs_cu12-4.8.1", "a.so,sha256=1,5\na.pyc,sha256=3,5\n")
    assert packages(monkeypatch, tmp_path) == first, "bytecode is not of the wheel"
    record(tmp_path, "nvidia_cutlass_dsl_libs_cu12-4.8.1", "a.so,sha256=9,5\n")
    assert packages(monkeypatch, tmp_path) != first


def test_a_build_from_source_is_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cutlass", SimpleNamespace(__file__=str(tmp_path / "cutlass" / "__init__.py")))  # type: ignore[arg-type]
    (tmp_path / "cutlass").mkdir()
    source = tmp_path / "cutlass" / "__init__.py"
    source.write_text("a = 1")
    (first,) = adapter.packages.__wrapped__()
    assert first.startswith("cutlass ")


def test_it_holds_the_library_that_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before 4.6 the libraries of CUDA 12 and 13 have one name: the one that was installed last is there."""
    file = tmp_path / "_cutlass_ir.so"
    monkeypatch.setitem(sys.modules, "cutlass._mlir._mlir_libs._cutlass_ir", SimpleNamespace(__file__=str(file)))  # type: ignore[arg-type]
    file.write_bytes(b"12")
    first = adapter.library.__wrapped__()
    file.write_bytes(b"for 13")
    assert (first, adapter.library.__wrapped__()) == ("_cutlass_ir.so 2", "_cutlass_ir.so 6")
