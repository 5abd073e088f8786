"""Fixtures of the tests of what is shipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the image builds it, but for an index: what builds it is what is installed here.

    Tests that use it are of the group ``wheel``: one worker builds it.
    """
    pytest.importorskip("setuptools")
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("kcoord", "launch"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "dist",
        ".",
    ]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120)
    if "No module named pip" in done.stderr:
        pytest.skip("no pip in this environment")
    assert done.returncode == 0, done.stderr
    (found,) = (copy / "dist").glob("*.whl")
    return found
