"""The stale-hit matrix of the generic API: whatever changes, what is served is what a fresh process would compile.

The oracle is the compiled code, never the key.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stale import matrix as shared
from tests.stale.generic_ways import ROWS
from tests.stale.matrix import Matrix
from tests.stale.row import Row
from tests.stale.worlds import by_row, code

pytestmark = pytest.mark.timeout(900)  # the matrix is compiled in a dozen processes, beside other tests


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    with shared.compiled("tests.stale.generic_ways", ROWS, naive=True) as matrix:
        yield matrix


@by_row(ROWS)
def test_the_change_is_one_of_the_code_and_a_naive_cache_misses_it(row: Row, matrix: Matrix) -> None:
    shared.check_the_change(row, matrix)
    old = code(matrix.oracle.before, row, "call")
    assert matrix.naive is not None
    alive, edited = (code(o, row, "call") for o in (matrix.naive.same, matrix.naive.new))
    assert alive == old, "in the same process"
    assert edited == old, "in a new process"


@by_row(ROWS)
def test_a_new_process_is_served_the_new_code(row: Row, matrix: Matrix) -> None:
    shared.check_a_new_process(row, matrix)


@by_row(ROWS)
def test_a_changed_process_that_makes_a_new_key_is_served_the_new_code(row: Row, matrix: Matrix) -> None:
    shared.check_a_new_key(row, matrix)


@by_row([r for r in ROWS if r.names])
def test_a_changed_process_is_told_what_has_drifted(row: Row, matrix: Matrix) -> None:
    error = matrix.raises.same[row.what]["call"].error
    assert error.startswith("GlobalsDrift: ")
    assert row.named_in(error)


@by_row([r for r in ROWS if not r.names])
def test_what_is_no_drift_raises_nothing_and_is_served_anew(row: Row, matrix: Matrix) -> None:
    served, true = code(matrix.raises.same, row, "call"), code(matrix.oracle.same, row, "call")
    assert served == true


@by_row(ROWS)
def test_changed_back_it_is_served_the_old_code_without_a_compile(row: Row, matrix: Matrix) -> None:
    shared.check_changed_back(row, matrix)


@by_row(ROWS)
def test_with_nothing_changed_another_process_compiles_nothing(row: Row, matrix: Matrix) -> None:
    shared.check_nothing_changed(row, matrix)


def test_nothing_goes_wrong_inside(matrix: Matrix) -> None:
    assert matrix.raises.stderr == matrix.rekeyed.stderr == ""
