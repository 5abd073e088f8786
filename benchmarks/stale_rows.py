"""Stale rows: an input that changes the code, and which cache then serves the old one; stock and kcoord in one run.

The rows are those of the backend suite. The truth is a process with an empty cache and without kcoord.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from benchmarks.result import Result
from kcoord.testing.backends import BackendSuite, World

_SUITES = (
    ("Triton", "triton", "triton", "TestTriton"),
    ("cpp_extension", "torch", "ninja", "TestNinja"),
    ("TileLang, for this processor", "tilelang", "tilelang", "TestForTheProcessor"),
    ("TileLang, for a GPU", "tilelang", "tilelang", "TestForAGPU"),
    ("CuTe DSL", "nvidia_cutlass_dsl", "cutedsl", "TestCuTeDSL"),
    ("FlyDSL", "flydsl", "flydsl", "TestFlyDSL"),
    ("cuTile", "cutile_cache", "cutile", "TestCuTile"),
)
"""A name, the package that it needs, the folder of its tests, and their class."""
_STOCK = {"KCOORD_DISABLE": "1"}


def run() -> Result:
    columns = [
        "compiler",
        "changed input",
        "stock: same process",
        "next process",
        "kcoord: same process",
        "next process",
    ]
    result = Result("Stale rows", columns)
    for title, needs, folder, name in _SUITES:
        if find_spec(needs) is None:
            continue
        suite: BackendSuite = getattr(import_module(f"tests.unit.backends.{folder}.test_conformance"), name)()
        for row in suite.changes:
            cells = [title, row, *_cells(suite, row)]
            result.rows.append(cells)
            print(f"  {' | '.join(cells)}", file=sys.stderr, flush=True)
    for number, who in ((2, "stock"), (4, "kcoord")):
        stale = sum("stale" in row[number : number + 2] for row in result.rows)
        result.notes.append(f"{who}: {stale} of {len(result.rows)} rows stale")
    return result


def _cells(suite: BackendSuite, row: str) -> Iterator[str]:
    with _world(suite, _STOCK) as world:
        true = world.run(["change", row], ["build", 1])[1]["code"]
    for environ in (_STOCK, {}):
        with _world(suite, environ) as world:
            _, _, same = world.run(["build", 1], ["change", row], ["build", 1])
            _, following = world.run(["change", row], ["build", 1])
        yield from ("-" if each.get("code") == true else "stale" for each in (same, following))


@contextmanager
def _world(suite: BackendSuite, environ: dict[str, str]) -> Iterator[World]:
    root = Path(tempfile.mkdtemp(prefix="kc-", dir="/tmp"))
    world = World(root, suite.program, {**suite.environment(root), **environ})
    try:
        yield world
    finally:
        world.close()
        shutil.rmtree(root, ignore_errors=True)
