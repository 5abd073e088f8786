"""The stale-hit matrix of Triton: whatever changes, the kernel that is served is what a fresh process would compile.

The oracle is the compiled code, never the key: PTX and cubin, or their like, from Triton without kcoord.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

pytest.importorskip("triton")

from tests.stale.row import Row
from tests.stale.triton_rows import ROWS
from tests.stale.worlds import Changes, Outcomes, Verdicts, World, by_row, code, consult, together
from tests.support.sandbox import WITH_TRITON, sandboxed

TABLE = "tests.stale.triton_ways"
SETTINGS = {
    "TRITON_ALLOW_NON_CONSTEXPR_GLOBALS": "1",
    "TRITON_DISABLE_LINE_INFO": "1",  # each world has its own directory
}
both_ways = pytest.mark.parametrize("way", ["launch", "compile"])

pytestmark = pytest.mark.timeout(900)  # the matrix is compiled in a dozen processes, beside other tests


@dataclass(frozen=True)
class Matrix:
    oracle: Changes
    kcoord: Verdicts
    stock: Changes


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    with sandboxed() as box:
        kcoord = World(box, "kcoord", TABLE, ROWS, WITH_TRITON, **SETTINGS)
        stock = World(box, "stock", TABLE, ROWS, WITH_TRITON, KCOORD_DISABLE="1", **SETTINGS)

        def oracle(state: str, *steps: str) -> Outcomes:
            return consult(box, TABLE, ROWS, WITH_TRITON, state, *steps, **SETTINGS)

        served, without, same, new = together(
            kcoord.verdicts,
            stock.changes,
            lambda: oracle("before", "change", "compile"),
            lambda: oracle("after", "compile"),
        )
        # Triton's own process whose cache is empty is what the oracle would be
        yield Matrix(Changes(without.before, same, new), served, without)


@by_row(ROWS)
@both_ways
def test_what_a_fresh_process_would_compile_is_served_or_the_change_is_named(
    row: Row, way: str, matrix: Matrix
) -> None:
    old, alive, edited = (code(o, row, "launch") for o in (matrix.oracle.before, matrix.oracle.same, matrix.oracle.new))
    assert old not in (alive, edited), "the change is none of the code"
    found = matrix.kcoord
    assert code(found.new, row, way) == edited
    error = found.same[row.what][way].error
    if row.names and error:
        assert row.named_in(error)
        assert "changed" in error
    else:
        assert code(found.same, row, way) == alive
    assert code(found.before, row, way) == code(found.back, row, way) == old
    assert found.back[row.what][way].compiles == 0 or not row.shared


@by_row([r for r in ROWS if r.stock])
def test_without_kcoord_the_old_kernel_is_served(row: Row, matrix: Matrix) -> None:
    old = code(matrix.oracle.before, row, "launch")
    if "same" in row.stock:
        assert code(matrix.stock.same, row, "launch") == old
    if "new" in row.stock:
        assert [code(matrix.stock.new, row, way) for way in ("launch", "compile")] == [old, old]


@by_row([r for r in ROWS if r.shared])
def test_with_nothing_changed_another_process_compiles_nothing(row: Row, matrix: Matrix) -> None:
    """Else every test here would hold for a cache that never hits."""
    compiles = [o[row.what]["launch"].compiles for o in (matrix.kcoord.before, matrix.kcoord.again)]
    served, true = code(matrix.kcoord.again, row, "launch"), code(matrix.oracle.before, row, "launch")
    assert compiles == [1, 0]
    assert matrix.kcoord.again[row.what]["compile"].compiles == 0
    assert served == true


def test_nothing_goes_wrong_inside(matrix: Matrix) -> None:
    """Nothing is said but that a kernel with a value without identity is shared with nobody."""
    assert [line for line in matrix.kcoord.stderr.splitlines() if "of type Slotted is compiled" not in line] == []
