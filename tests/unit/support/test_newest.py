"""`make test-newest`: a release that cannot be used is named within seconds, by the reason."""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import newest

TILELANG = newest.Tested("tilelang", "tilelang", ("8.0", "9.0"), ())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of wheels, and no other index."""
    monkeypatch.setattr(newest, "_PLACES", tmp_path / "environments")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def release(index: Path, number: str, modules: Mapping[str, str]) -> None:
    info = f"tilelang-{number}.dist-info"
    with zipfile.ZipFile(index / f"tilelang-{number}-py3-none-any.whl", "w") as wheel:
        for name, code in modules.items():
            wheel.writestr(name, code)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tilelang\nVersion: {number}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_a_release_that_is_in_no_index_is_named_and_is_no_failure(index: Path) -> None:
    found = newest.outcome(TILELANG, "9.0", time.monotonic() + 120, ())
    assert (found.release, found.failed) == ("9.0", False)
    assert found.found.startswith("could not be installed: ERROR: No matching distribution found for tilelang==9.0")


def test_the_newest_release_of_the_index_fails_before_its_tests_if_a_hook_does_not_fit(index: Path) -> None:
    for number in ("9.0", "9.1"):
        modules = {"tilelang/__init__.py": f"__version__ = '{number}'", "tilelang/autotuner.py": ""}
        release(index, number, modules)
    found = newest.outcome(TILELANG, newest.NEWEST_OF_INDEX, time.monotonic() + 120, ())
    assert (found.release, found.failed) == ("9.1", True)
    assert found.found.startswith("tilelang 9.1: kernels off: CUDABinaryCache.load, ")


def test_without_time_nothing_is_installed(index: Path) -> None:
    found = newest.outcome(TILELANG, "9.0", time.monotonic(), ())
    assert (found.found, found.failed) == ("no time was left", False)
    assert list(index.iterdir()) == []


def test_the_newest_release_comes_first_and_then_the_oldest() -> None:
    tested = newest.Tested("tilelang", "tilelang", ("1", "2", "3"), ())
    assert list(tested.turns(of_index=False)) == ["3", "1", "2"]
    assert list(tested.turns(of_index=True)) == [newest.NEWEST_OF_INDEX, "1", "2"]


TESTS = {
    "fine": "def test_a(): pass\ndef test_b(): pytest.skip('of another release')",
    "failing": "def test_c(): assert 0",
    "lacking": "def test_d(): pytest.skip('needs nvcc')",
    "alone": "pytest.importorskip('none')",
}


@pytest.mark.parametrize(
    ("names", "found", "failed"),
    [
        (["fine"], "1 passed, 1 skipped", False),
        (
            [*TESTS],
            "1 failed, 1 passed, 3 skipped, a test could not import 'none': No module named 'none',"
            " a test needs nvcc, test_failing::test_c",
            True,
        ),
    ],
)
def test_what_is_skipped_for_want_of_something_is_a_failure(
    tmp_path: Path, names: list[str], found: str, failed: bool
) -> None:
    for name in names:
        (tmp_path / f"test_{name}.py").write_text(f"import pytest\n{TESTS[name]}\n")
    results = tmp_path / "results.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", tmp_path, f"--junitxml={results}"]
    subprocess.run([*command, tmp_path], cwd=tmp_path, stdout=subprocess.DEVNULL, timeout=60)
    assert newest._read(results) == (found, failed)


def test_a_pytest_that_ends_without_results_is_a_failure(tmp_path: Path) -> None:
    assert newest._read(tmp_path / "none.xml") == ("pytest ended without results", True)
