"""What holds for every row of the generic API: the assertions of the matrix, for any table of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.stale.row import Row
from tests.stale.worlds import Changed, Changes, Outcomes, Verdicts, World, code, consult, together
from tests.support.processes import WITH_KCOORD
from tests.support.sandbox import sandboxed


@dataclass(frozen=True)
class Matrix:
    oracle: Changes
    raises: Verdicts
    rekeyed: Changed
    naive: Changes | None


@contextlib.contextmanager
def compiled(table: str, rows: Sequence[Row], *, naive: bool) -> Iterator[Matrix]:
    """A process in which nothing changes knows nothing of what is to be done about drift: one mode has such processes."""
    with sandboxed() as box:
        worlds = {
            mode: World(box, mode, table, rows, WITH_KCOORD, STALE_MODE=mode) for mode in ("raise", "rekey", "naive")
        }

        def oracle(state: str, *steps: str) -> Outcomes:
            return consult(box, table, rows, WITH_KCOORD, state, *steps)

        *true, raised, rekeyed, missed = together(
            lambda: oracle("before", "compile"), lambda: oracle("before", "change", "compile"),
            lambda: oracle("after", "compile"), worlds["raise"].verdicts, worlds["rekey"].changed,
            worlds["naive"].changes if naive else lambda: None,
        )  # fmt: skip
        yield Matrix(Changes(*true), raised, rekeyed, missed)


def refused(outcomes: Outcomes, row: Row) -> bool:
    """True where `row` may be refused, and is."""
    return row.refuses and outcomes[row.what]["call"].error.startswith("KeyFactorError: ")


def check(row: Row, matrix: Matrix) -> None:
    """All that holds for every row, but for what a changed process is told."""
    _differs(row, matrix)
    _is_served_anew(row, matrix.raises.new, matrix.oracle.new)
    _is_served_anew(row, matrix.rekeyed.same, matrix.oracle.same)
    check_nothing_changed(row, matrix)


def _differs(row: Row, matrix: Matrix) -> None:
    old, alive, edited = (code(o, row, "call") for o in (matrix.oracle.before, matrix.oracle.same, matrix.oracle.new))
    assert alive != old, "the change in the process is none of the code"
    assert edited != old, "the edit is none of the code"


def _is_served_anew(row: Row, outcomes: Outcomes, oracle: Outcomes) -> None:
    if not refused(outcomes, row):
        served, true = code(outcomes, row, "call"), code(oracle, row, "call")
        assert served == true


def check_changed_back(row: Row, matrix: Matrix) -> None:
    """The old code is served without a compile."""
    old = code(matrix.oracle.before, row, "call")
    for found in (matrix.raises, matrix.rekeyed):
        if refused(found.back, row):
            continue
        again, compiles = code(found.back, row, "call"), found.back[row.what]["call"].compiles
        assert again == old
        if not refused(found.before, row):
            first = code(found.before, row, "call")
            assert first == old
            assert compiles == 0


def check_nothing_changed(row: Row, matrix: Matrix) -> None:
    """Another process compiles nothing. Else every test here would hold for a cache that never hits."""
    found = matrix.raises
    if not refused(found.before, row):
        compiles = [o[row.what]["call"].compiles for o in (found.before, found.again)]
        served, true = code(found.again, row, "call"), code(matrix.oracle.before, row, "call")
        assert compiles == [row.compiles, 0]
        assert served == true
