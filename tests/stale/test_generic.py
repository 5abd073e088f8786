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
def test_what_a_fresh_process_would_compile_is_served_or_the_drift_is_named(row: Row, matrix: Matrix) -> None:
    shared.check(row, matrix)
    shared.check_changed_back(row, matrix)
    if row.names:
        error = matrix.raises.same[row.what]["call"].error
        assert error.startswith("GlobalsDrift: ")
        assert row.named_in(error)
    else:
        served, true = code(matrix.raises.same, row, "call"), code(matrix.oracle.same, row, "call")
        assert served == true


@by_row(ROWS)
def test_a_naive_cache_misses_the_change(row: Row, matrix: Matrix) -> None:
    assert matrix.naive is not None
    alive, edited = (code(o, row, "call") for o in (matrix.naive.same, matrix.naive.new))
    assert alive == edited == code(matrix.oracle.before, row, "call")


def test_nothing_goes_wrong_inside(matrix: Matrix) -> None:
    assert matrix.raises.stderr == matrix.rekeyed.stderr == ""
