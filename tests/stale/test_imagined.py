"""The stale-hit matrix of rows that were imagined without a look at how keys are made: the language, shelf by shelf.

Nothing but this is wrong: old code in silence, or an error where nothing has changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stale import matrix as shared
from tests.stale.imagined_ways import ROWS
from tests.stale.limits import BEYOND, COMPILED_AGAIN, LIMITS
from tests.stale.matrix import Matrix
from tests.stale.row import Row
from tests.stale.worlds import by_row, code

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(900)  # the matrix is compiled in a dozen processes, beside other tests


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    with shared.compiled("tests.stale.imagined_ways", ROWS, naive=False) as matrix:
        yield matrix


@by_row([row for row in ROWS if row.what not in BEYOND])
def test_what_a_fresh_process_would_compile_is_served_or_a_drift_is_told(row: Row, matrix: Matrix) -> None:
    shared.check(row, matrix)
    if row.what not in COMPILED_AGAIN:
        shared.check_changed_back(row, matrix)
    outcomes = matrix.raises.same
    error = outcomes[row.what]["call"].error
    if not (error.startswith("GlobalsDrift: ") or shared.refused(outcomes, row)):
        served, true = code(outcomes, row, "call"), code(matrix.oracle.same, row, "call")
        assert served == true


def test_nothing_goes_wrong_inside(matrix: Matrix) -> None:
    assert matrix.raises.stderr == matrix.rekeyed.stderr == ""


@by_row([row for row in ROWS if row.what in BEYOND])
def test_a_limit_is_one_still(row: Row, matrix: Matrix) -> None:
    """Else its row belongs to the others, and docs/keys.md says too much."""
    shared.check_nothing_changed(row, matrix)
    served = [code(outcomes, row, "call") for outcomes in (matrix.rekeyed.same, matrix.raises.new)]
    true = [code(outcomes, row, "call") for outcomes in (matrix.oracle.same, matrix.oracle.new)]
    assert served != true


def test_the_limits_are_few_and_each_is_told() -> None:
    told = " ".join((ROOT / "docs" / "keys.md").read_text().split())
    assert len(LIMITS) <= 6
    assert [limit for limit in LIMITS if limit not in told] == []
    assert BEYOND.keys() <= {row.what for row in ROWS}
