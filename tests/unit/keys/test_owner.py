"""Code that came to a process by value is the script's, though ``__main__`` there is installed: Ray, joblib, submitit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_WORKER = """
import sys, types
from kcoord.keys import CacheKey
from kcoord.keys.function.walk import content_of

def beats():
    return 1

path, name = sys.argv[1:]
by_value = {"__name__": "__main__", "__builtins__": __builtins__}
exec(compile(open(path).read(), name, "exec"), by_value)
by_value["beats"] = beats
print(CacheKey.of("python", "build", **content_of(by_value["build"]).factors()).digest)
"""
_SCRIPT = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Tile:
    size: int = 1

class Layout:
    def rows(self): return 2

def helper(x): return x + 3

def build(x):
    return helper(x), Tile(), Layout().rows(), beats()
"""


def key(directory: Path, script: str, name: str = "") -> str:
    """Of `build` in a worker whose ``__main__`` is an installed package's."""
    worker, file = directory / "site-packages" / "worker.py", directory / "train.py"
    worker.parent.mkdir(exist_ok=True)
    worker.write_text(_WORKER)
    file.write_text(script)
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, worker, file, name or file], env={"PATH": os.environ["PATH"], "PYTHONPATH": path},
        cwd=directory, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["", "<stdin>"], ids=["a script", "a notebook"])
@pytest.mark.parametrize(
    "edit", [("x + 3", "x + 4"), ("int = 1", "int = 2"), ("return 2", "return 3")], ids=" -> ".join
)
def test_an_edit_of_the_script_counts_in_a_worker(tmp_path: Path, edit: tuple[str, str], name: str) -> None:
    before = key(tmp_path, _SCRIPT, name)
    assert key(tmp_path, _SCRIPT, name) == before
    assert key(tmp_path, _SCRIPT.replace(*edit), name) != before
