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


@by_row(ROWS)
def test_the_change_is_one_of_the_code(row: Row, matrix: Matrix) -> None:
    shared.check_the_change(row, matrix)


KNOWN = [row for row in ROWS if row.what not in BEYOND]


@by_row(KNOWN)
def test_a_new_process_is_served_the_new_code(row: Row, matrix: Matrix) -> None:
    shared.check_a_new_process(row, matrix)


@by_row(KNOWN)
def test_a_changed_process_that_makes_a_new_key_is_served_the_new_code(row: Row, matrix: Matrix) -> None:
    shared.check_a_new_key(row, matrix)


@by_row(KNOWN)
def test_a_changed_process_is_told_of_the_drift_or_served_the_new_code(row: Row, matrix: Matrix) -> None:
    outcomes = matrix.raises.same
    error = outcomes[row.what]["call"].error
    if not (error.startswith("GlobalsDrift: ") or shared.refused(outcomes, row)):
        served, true = code(outcomes, row, "call"), code(matrix.oracle.same, row, "call")
        assert served == true


@by_row([row for row in KNOWN if row.what not in COMPILED_AGAIN])
def test_changed_back_it_is_served_the_old_code_without_a_compile(row: Row, matrix: Matrix) -> None:
    shared.check_changed_back(row, matrix)


@by_row(ROWS)
def test_with_nothing_changed_another_process_compiles_nothing(row: Row, matrix: Matrix) -> None:
    shared.check_nothing_changed(row, matrix)


def test_nothing_goes_wrong_inside(matrix: Matrix) -> None:
    assert matrix.raises.stderr == matrix.rekeyed.stderr == ""


@by_row([row for row in ROWS if row.what in BEYOND])
def test_a_limit_is_one_still(row: Row, matrix: Matrix) -> None:
    """Else its row belongs to the others, and docs/keys.md says too much."""
    served = [code(outcomes, row, "call") for outcomes in (matrix.rekeyed.same, matrix.raises.new)]
    true = [code(outcomes, row, "call") for outcomes in (matrix.oracle.same, matrix.oracle.new)]
    assert served != true


def test_the_limits_are_few_and_each_is_told() -> None:
    told = " ".join((ROOT / "docs" / "keys.md").read_text().split())
    assert len(LIMITS) <= 6
    assert [limit for limit in LIMITS if limit not in told] == []
    assert BEYOND.keys() <= {row.what for row in ROWS}
