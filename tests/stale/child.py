"""One process of the matrix: it compiles every row of a table, changes what the rows depend on, and compiles again.

``python -m tests.stale.child TABLE TREE STATE STEP…``: STATE is what the files are, ``before`` or ``after``; a step is
``compile``, ``change`` or ``undo``. Prints one JSON line: for each row, one entry per ``compile``, its outcome by way.
"""

from __future__ import annotations

import kcoord

kcoord.install()

import contextlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator, Mapping  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from tests.stale.row import Row  # noqa: E402


@contextlib.contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(saved)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class Trial:
    """One row in this process."""

    def __init__(self, row: Row, table: Any, tree: Path, after: bool) -> None:
        self.row, self.table, self.tree, self.after = row, table, tree, after

    def run(self, steps: list[str]) -> list[dict[str, Any]]:
        found = []
        for step in steps:
            self.after = self.after if step == "compile" else step == "change"
            with variables(self.row.variables(self.tree, self.after)):
                if step == "compile":
                    found.append({way: self.compile(way) for way in self.table.WAYS})
                else:
                    self.change()
        return found

    def change(self) -> None:
        if self.row.edits_live:
            self.row.write(self.tree, self.after)
        try:
            exec(self.row.change if self.after else self.row.undo, vars(self.subject()))
        except Exception as error:
            raise RuntimeError(f"row {self.row.what!r}: {error}") from error

    def subject(self) -> Any:
        return importlib.import_module(f"{self.row.package}.subject")

    def compile(self, way: str) -> dict[str, Any]:
        compiles = kcoord.connect().counters.read()["compiles"]
        try:
            with self.table.device(self.row.device[self.after]):
                code = self.table.WAYS[way](self.row.call, vars(self.subject()))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this row's outcome and no other's
            return {"error": f"{type(error).__name__}: {error}"}
        return {"code": code, "compiles": kcoord.connect().counters.read()["compiles"] - compiles}


def main(table: str, tree: str, state: str, *steps: str) -> None:
    sys.path.insert(0, tree)
    module = importlib.import_module(table)
    trials = {r.what: Trial(r, module, Path(tree), state == "after").run(list(steps)) for r in module.ROWS}
    sys.stdout.write(json.dumps(trials) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
