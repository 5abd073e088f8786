"""Backwards that overwrite saved tensors: a step holds no more memory than stock's, and a graph that is retained is whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.sandbox import PROGRAMS, Sandbox, sandboxed

pytest.importorskip("torch")

VARIANTS = ["bfloat16", "ddp"]
Found = dict[tuple[str, str], Any]
"""By variant and step: the loss and digests of the gradients, or bytes."""


def run(box: Sandbox, caches: str, *steps: str, stock: bool = False, **more: Any) -> Found:
    """`caches`: the directory of torch's own."""
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(box.root / caches),
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "OMP_NUM_THREADS": "1",
        "STOCK": "1" if stock else None,
    }
    wanted = json.dumps({"steps": steps, "variants": VARIANTS, **more})
    done = box.run_forked(PROGRAMS / "donating.py", wanted, timeout=400, **environment)
    assert done.returncode == 0, done.stderr
    assert "please report it" not in done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    found: Found = {}
    for variant, step, result in lines:
        assert found.setdefault((variant, step), result) == result, "it depends on the steps before it"
    return found


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    """One for all: torch precompiles its headers once for each temporary directory."""
    with sandboxed() as box:
        yield box


@pytest.fixture(scope="module")
def true(box: Sandbox) -> Found:
    """What stock computes, and what it holds: its first backward says whether it donates."""
    first = run(box, "first", "retained", "graph", stock=True)
    graphs = shutil.ignore_patterns("aotautograd", "fxgraph")  # the libraries of the forward stay
    shutil.copytree(box.root / "first", box.root / "second", ignore=graphs)
    return first | run(box, "second", "once", "measured", stock=True)


def test_steps_that_retain_their_graph_and_steps_that_do_not_are_those_of_stock_in_any_order(
    box: Sandbox, true: Found
) -> None:
    """For who compiles the unit, who finds it in torch's own cache, and who loads it. Stock refuses the second and the third."""
    for caches, steps in (
        ("one", ("once", "retained", "once", "graph", "once", "measured")),
        ("one", ("retained", "once", "graph", "retained")),
        ("another", ("graph", "retained", "once", "measured")),
    ):
        for (variant, step), result in run(box, caches, *steps).items():
            expected = true[variant, step]
            if step == "measured":
                assert result <= 1.02 * expected, (variant, f"{result} bytes, and stock {expected}")
            else:
                assert result == expected, (variant, step)


def test_a_backward_that_retains_its_graph_takes_none_that_donates_from_torchs_cache_of_graphs(
    box: Sandbox, true: Found
) -> None:
    """Torch's key of a graph does not tell them apart, and stock has wrong gradients here."""
    for step in ("once", "retained"):
        found = run(box, "graphs", step, cached=False, variants=["bfloat16"])
        assert found == {("bfloat16", step): true["bfloat16", step]}
