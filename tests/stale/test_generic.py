"""The stale-hit matrix of the generic API: whatever changes, what is served is what a fresh process would compile.

The oracle is the compiled code, never the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.stale.generic_ways import ROWS
from tests.stale.row import Row
from tests.stale.worlds import Changes, Outcomes, Verdicts, World, by_row, code, consult, together
from tests.support.processes import WITH_KCOORD
from tests.support.sandbox import sandboxed

TABLE = "tests.stale.generic_ways"

pytestmark = pytest.mark.timeout(900)  # the matrix is compiled in a dozen processes, beside other tests


@dataclass(frozen=True)
class Matrix:
    oracle: Changes
    kcoord: dict[str, Verdicts]
    """By what is done about drift."""
    naive: Changes


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    with sandboxed() as box:
        worlds = [World(box, mode, TABLE, ROWS, WITH_KCOORD, STALE_MODE=mode) for mode in ("raise", "rekey", "naive")]
        raises, rekeys, naive = worlds

        def oracle(state: str, *steps: str) -> Outcomes:
            return consult(box, TABLE, ROWS, WITH_KCOORD, state, *steps)

        *true, raised, rekeyed, missed = together(
            lambda: oracle("before", "compile"), lambda: oracle("before", "change", "compile"),
            lambda: oracle("after", "compile"), raises.verdicts, rekeys.verdicts, naive.changes,
        )  # fmt: skip
        yield Matrix(Changes(*true), {"raise": raised, "rekey": rekeyed}, missed)


@by_row(ROWS)
def test_the_change_is_one_of_the_code_and_a_naive_cache_misses_it(row: Row, matrix: Matrix) -> None:
    old, alive, edited = (code(o, row, "call") for o in (matrix.oracle.before, matrix.oracle.same, matrix.oracle.new))
    assert alive != old
    assert edited != old
    alive, edited = (code(o, row, "call") for o in (matrix.naive.same, matrix.naive.new))
    assert alive == old, "in the same process"
    assert edited == old, "in a new process"


@by_row(ROWS)
def test_a_new_process_is_served_the_new_code(row: Row, matrix: Matrix) -> None:
    true = code(matrix.oracle.new, row, "call")
    for verdicts in matrix.kcoord.values():
        served = code(verdicts.new, row, "call")
        assert served == true


@by_row(ROWS)
def test_a_changed_process_that_makes_a_new_key_is_served_the_new_code(row: Row, matrix: Matrix) -> None:
    served, true = code(matrix.kcoord["rekey"].same, row, "call"), code(matrix.oracle.same, row, "call")
    assert served == true


@by_row([r for r in ROWS if r.names])
def test_a_changed_process_is_told_what_has_drifted(row: Row, matrix: Matrix) -> None:
    error = matrix.kcoord["raise"].same[row.what]["call"].error
    assert error.startswith("GlobalsDrift: ")
    assert row.named_in(error)


@by_row([r for r in ROWS if not r.names])
def test_what_is_no_drift_raises_nothing_and_is_served_anew(row: Row, matrix: Matrix) -> None:
    served, true = code(matrix.kcoord["raise"].same, row, "call"), code(matrix.oracle.same, row, "call")
    assert served == true


@by_row(ROWS)
@pytest.mark.parametrize("mode", ["raise", "rekey"])
def test_changed_back_it_is_served_the_old_code_without_a_compile(row: Row, mode: str, matrix: Matrix) -> None:
    verdicts, old = matrix.kcoord[mode], code(matrix.oracle.before, row, "call")
    first, again = code(verdicts.before, row, "call"), code(verdicts.back, row, "call")
    compiles = verdicts.back[row.what]["call"].compiles
    assert first == old
    assert again == old
    assert compiles == 0


@by_row(ROWS)
def test_with_nothing_changed_another_process_compiles_nothing(row: Row, matrix: Matrix) -> None:
    """Else every test here would hold for a cache that never hits."""
    for verdicts in matrix.kcoord.values():
        compiles = [o[row.what]["call"].compiles for o in (verdicts.before, verdicts.again)]
        served, true = code(verdicts.again, row, "call"), code(matrix.oracle.before, row, "call")
        assert compiles == [1, 0]
        assert served == true


@pytest.mark.parametrize("mode", ["raise", "rekey"])
def test_nothing_goes_wrong_inside(mode: str, matrix: Matrix) -> None:
    assert matrix.kcoord[mode].stderr == ""
