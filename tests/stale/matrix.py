"""What holds for every row of the generic API: the assertions of the matrix, for any table of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.stale.row import Row
from tests.stale.worlds import Changes, Outcomes, Verdicts, World, code, consult, together
from tests.support.processes import WITH_KCOORD
from tests.support.sandbox import sandboxed


@dataclass(frozen=True)
class Matrix:
    oracle: Changes
    kcoord: dict[str, Verdicts]
    """By what is done about drift."""
    naive: Changes


@contextlib.contextmanager
def compiled(table: str, rows: Sequence[Row]) -> Iterator[Matrix]:
    with sandboxed() as box:
        worlds = [World(box, mode, table, rows, WITH_KCOORD, STALE_MODE=mode) for mode in ("raise", "rekey", "naive")]
        raises, rekeys, naive = worlds

        def oracle(state: str, *steps: str) -> Outcomes:
            return consult(box, table, rows, WITH_KCOORD, state, *steps)

        *true, raised, rekeyed, missed = together(
            lambda: oracle("before", "compile"), lambda: oracle("before", "change", "compile"),
            lambda: oracle("after", "compile"), raises.verdicts, rekeys.verdicts, naive.changes,
        )  # fmt: skip
        yield Matrix(Changes(*true), {"raise": raised, "rekey": rekeyed}, missed)


def refused(outcomes: Outcomes, row: Row) -> bool:
    """True where `row` may be refused, and is."""
    return row.refuses and outcomes[row.what]["call"].error.startswith("KeyFactorError: ")


def check_the_change(row: Row, matrix: Matrix) -> None:
    old, alive, edited = (code(o, row, "call") for o in (matrix.oracle.before, matrix.oracle.same, matrix.oracle.new))
    assert alive != old
    assert edited != old


def check_a_new_process(row: Row, matrix: Matrix) -> None:
    true = code(matrix.oracle.new, row, "call")
    for verdicts in matrix.kcoord.values():
        if not refused(verdicts.new, row):
            served = code(verdicts.new, row, "call")
            assert served == true


def check_a_new_key(row: Row, matrix: Matrix) -> None:
    outcomes = matrix.kcoord["rekey"].same
    if not refused(outcomes, row):
        served, true = code(outcomes, row, "call"), code(matrix.oracle.same, row, "call")
        assert served == true


def check_changed_back(row: Row, mode: str, matrix: Matrix) -> None:
    verdicts, old = matrix.kcoord[mode], code(matrix.oracle.before, row, "call")
    if refused(verdicts.back, row):
        return
    again, compiles = code(verdicts.back, row, "call"), verdicts.back[row.what]["call"].compiles
    assert again == old
    if not refused(verdicts.before, row):
        first = code(verdicts.before, row, "call")
        assert first == old
        assert compiles == 0


def check_nothing_changed(row: Row, matrix: Matrix) -> None:
    """Else every test here would hold for a cache that never hits."""
    for verdicts in matrix.kcoord.values():
        if refused(verdicts.before, row):
            continue
        compiles = [o[row.what]["call"].compiles for o in (verdicts.before, verdicts.again)]
        served, true = code(verdicts.again, row, "call"), code(matrix.oracle.before, row, "call")
        assert compiles == [row.compiles, 0]
        assert served == true
