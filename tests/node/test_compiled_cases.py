"""Whatever is compiled, by the rank that does it and by a rank that loads it: stock's results, to the bit."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.support.fuzzing import is_long
from tests.support.sandbox import PROGRAMS, Sandbox

pytest.importorskip("torch")

_STEPS = (
    "product", "gelu", "softmax", "norm", "halves", "rows", "even", "large", "in place", "break", "view", "dropout",
)  # fmt: skip


def cases_of(seed: int) -> list[dict[str, Any]]:
    """Six cases, of which each step is in at least one."""
    draw = random.Random(seed)
    steps = draw.sample(_STEPS, len(_STEPS))
    return [
        {
            "steps": [*steps[number : number + 2], *draw.sample(_STEPS, draw.randint(0, 2))],
            "dtype": draw.choice(["float32", "float64", "bfloat16"]),
            "rows": [draw.randint(1, 7) for _ in range(draw.randint(1, 3))],
            "dynamic": draw.choice([None, True, False]),
            **{flag: draw.random() < 0.5 for flag in ("grad", "autocast", "retain")},
        }
        for number in range(0, len(steps), 2)
    ]


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
    assert "stands aside from" not in done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.fuzz
def test_who_compiles_and_who_loads_have_the_results_of_stock(sandbox: Sandbox) -> None:
    """The same cases each time; ``make fuzz`` draws others."""
    seed = random.SystemRandom().randrange(1 << 32) if is_long() else 1
    cases = cases_of(seed)
    true = run(sandbox, "stock", cases, stock=True)
    first, second = run(sandbox, "first", cases), run(sandbox, "second", cases)
    for case, expected, compiled, loaded in zip(cases, true, first, second, strict=True):
        assert loaded[0] == compiled[0], (seed, case)
        # stock, of a graph whose buffers it has given away
        refused = case["retain"] and expected[0] == "RuntimeError"
        assert refused or compiled[0] == expected[0], (seed, case)
    assert sum(traces for _, traces in second) <= sum(traces for _, traces in first) // 2, seed
