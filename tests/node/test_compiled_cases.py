"""Whatever is compiled, by the rank that does it and by a rank that loads it: stock's results, to the bit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fuzzing import fuzz
from tests.support.sandbox import PROGRAMS, Sandbox, sandboxed

pytest.importorskip("torch")

_STEPS = (
    "product",
    "gelu",
    "softmax",
    "norm",
    "halves",
    "rows",
    "even",
    "large",
    "in place",
    "break",
    "view",
    "dropout",
)
_CASES = st.fixed_dictionaries(
    {
        "steps": st.lists(st.sampled_from(_STEPS), min_size=1, max_size=4),
        "dtype": st.sampled_from(["float32", "float64", "bfloat16"]),
        "rows": st.lists(st.integers(1, 7), min_size=1, max_size=3),
        "dynamic": st.sampled_from([None, True, False]),
        "grad": st.booleans(),
        "autocast": st.booleans(),
        "retain": st.booleans(),
    }
)


def run(box: Sandbox, caches: str, cases: list[Any], stock: bool = False) -> list[tuple[str, int]]:
    """The result of each case, and how often torch traced for it."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(box.root / caches),
        "STOCK": "1" if stock else None,
        "OMP_NUM_THREADS": "1",
    }
    done = box.run_forked(PROGRAMS / "compiled_cases.py", json.dumps(cases), timeout=400, **environment)
    assert done.returncode == 0, done.stderr
    assert "please report it" not in done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@given(cases=st.lists(_CASES, min_size=12, max_size=12))
@fuzz(1)
def test_who_compiles_and_who_loads_have_the_results_of_stock(cases: list[Any]) -> None:
    with sandboxed() as box:
        true = run(box, "stock", cases, stock=True)
        first, second = run(box, "first", cases), run(box, "second", cases)
        for case, expected, compiled, loaded in zip(cases, true, first, second, strict=True):
            assert loaded[0] == compiled[0], case
            # stock, of a graph whose buffers it has given away
            refused = case["retain"] and expected[0] == "RuntimeError"
            assert refused or compiled[0] == expected[0], case
        assert sum(traces for _, traces in second) <= sum(traces for _, traces in first) // 2
