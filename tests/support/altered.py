"""Another release of a compiler: its modules with code of a test's at their end, in processes that a test starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kcoord.backends.registry import compiler_of
from kcoord.cli import doctor
from tests.support.sandbox import PROGRAMS, Sandbox

_PROGRAM = """
import sys
from importlib.machinery import PathFinder

class Altered:
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            exec({code!r}, vars(module))
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Altered())
"""
PASSES = """
parse = PassManager.parse

class Newer:
    def __init__(self, text):
        self._passes = parse(text)
    def __getattr__(self, name):
        return getattr(self._passes, name)

PassManager.parse = staticmethod(Newer)
"""
"""MLIR's pass manager, of a release whose `parse` makes something else."""


def alter(module: str, code: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on `code` follows in `module`, before kcoord hooks it. `place` is an empty directory."""
    (place / "sitecustomize.py").write_text(_PROGRAM.format(module=module, code=code))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")])))


def findings(compiler: str) -> list[tuple[str, str, str]]:
    """Doctor's, of an installed compiler: the state, the subject and the finding."""
    declared = compiler_of(compiler)
    assert declared is not None
    return [(each.state, each.what, each.finding) for each in doctor._examined([declared])]


def asides(sandbox: Sandbox, *modes: str, start: bool = False, **more: str) -> list[list[str]]:
    """The compilers that kcoord stood aside from in a process of ``passed_by.py``, each with its notice, which is told once."""
    own = {f"{name}_CACHE_DIR": str(sandbox.root / name) for name in ("TRITON", "TORCHINDUCTOR")}
    given = {"KCOORD_SPAWN": "0", **own, **more}
    program = PROGRAMS / "passed_by.py"
    done = sandbox.run(program, *modes, **given) if start else sandbox.run_forked(program, *modes, **given)
    assert done.returncode == 0, done.stderr
    assert ("please report it" in done.stderr) is ("fault" in modes)
    found = json.loads(done.stdout.splitlines()[-1])
    told = [line for line in done.stderr.splitlines() if "stands aside from" in line]
    assert len(told) == len(found)
    notices = [line.partition(": ")[2].partition(": ")[2].rpartition(", which")[0] for line in told]
    return [[each["compiler"], notice] for each, notice in zip(found, notices, strict=True)]
