"""Running a table: in worlds that keep what they compile, and in fresh processes with nothing kept, which are the oracle."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.stale.row import Row
from tests.support.sandbox import Sandbox, finish

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    """What one compile gave: its code, and how many compiles kcoord counted for it; or its error."""

    code: str = ""
    compiles: int = 0
    error: str = ""


Outcomes = dict[str, dict[str, Outcome]]
"""By row, then by way of compiling."""


def code(outcomes: Outcomes, row: Row, way: str) -> str:
    """The code that `row` got. An error where code was expected fails the test."""
    found = outcomes[row.what][way]
    if found.error:
        pytest.fail(found.error)
    return found.code


@dataclass(frozen=True)
class Changed:
    """What a world served to one process."""

    before: Outcomes
    same: Outcomes
    """Changed in the running process,"""
    back: Outcomes
    """and changed back."""
    stderr: str
    """What all processes wrote, but for the summary of a job."""


@dataclass(frozen=True)
class Verdicts(Changed):
    """And to others."""

    again: Outcomes
    """Another process, with nothing changed."""
    new: Outcomes
    """Another process, after the edit."""


@dataclass(frozen=True)
class Changes:
    """What is compiled before the change, after it was made alive, and after the edit."""

    before: Outcomes
    same: Outcomes
    new: Outcomes


class World:
    """One cache and one tree of files, and the processes that see them one after another."""

    def __init__(
        self, box: Sandbox, name: str, table: str, rows: Sequence[Row], preload: str, **variables: str
    ) -> None:
        self._box, self._table, self._rows, self._preload = box, table, rows, preload
        self._home = box.root / name
        self._stderr: list[str] = []
        self._variables = {
            "KCOORD_LOCAL_DIR": str(self._home / "local"),
            "TRITON_CACHE_DIR": str(self._home / "triton"),
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONDONTWRITEBYTECODE": "1",  # Python's own cache: an edit within a second is not seen
            **variables,
        }

    def run(self, state: str, *steps: str) -> list[Outcomes]:
        """A process that finds the files in `state`; what it got at each ``compile`` of `steps`."""
        tree = self._home / "tree"
        for row in self._rows:
            row.write(tree, state == "after")
        arguments = ("-m", "tests.stale.child", self._table, tree, state, *steps)
        done = finish(self._box.fork(*arguments, preload=self._preload, **self._variables), timeout=600)
        assert done.returncode == 0, done.stderr
        self._stderr += [line for line in done.stderr.splitlines() if " kernels: " not in line]
        return _parse(json.loads(done.stdout.splitlines()[-1]), steps.count("compile"))

    def changed(self) -> Changed:
        before, same, back = self.run("before", "compile", "change", "compile", "undo", "compile")
        return Changed(before, same, back, "\n".join(self._stderr))

    def verdicts(self) -> Verdicts:
        found = self.changed()
        (again,) = self.run("before", "compile")
        (new,) = self.run("after", "compile")
        return Verdicts(found.before, found.same, found.back, "\n".join(self._stderr), again, new)

    def changes(self) -> Changes:
        """``before``, ``same`` and ``new`` alone."""
        before, same = self.run("before", "compile", "change", "compile")
        (new,) = self.run("after", "compile")
        return Changes(before, same, new)


def _parse(trials: dict[str, list[dict[str, Any]]], count: int) -> list[Outcomes]:
    return [
        {what: {way: Outcome(**found) for way, found in entries[n].items()} for what, entries in trials.items()}
        for n in range(count)
    ]


def consult(
    box: Sandbox, table: str, rows: Sequence[Row], preload: str, state: str, *steps: str, **variables: str
) -> Outcomes:
    """Ask the oracle: a process that keeps nothing, with a tree and a cache of its own, which compiles once in `steps`."""
    variables = {"KCOORD_DISABLE": "1", "TRITON_ALWAYS_COMPILE": "1", "STALE_MODE": "oracle", **variables}
    (found,) = World(box, "-".join(["oracle", state, *steps]), table, rows, preload, **variables).run(state, *steps)
    return found


def together(*tasks: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(max_workers=2) as pool:
        return [f.result() for f in [pool.submit(t) for t in tasks]]


def by_row(rows: Sequence[Row]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=str)
