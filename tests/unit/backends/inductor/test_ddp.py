"""The promise of a unit that was passed over: its outputs lie as the next unit was compiled for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


def test_outputs_that_lie_otherwise_are_copied_and_gradients_pass_through() -> None:
    from kcoord.backends.inductor.ddp import restrided

    weight = torch.ones(2, 3, requires_grad=True)
    moved, kept = (weight * 2).t().contiguous().t(), weight + 1
    outputs = restrided((moved, kept, 7), [(3, 1), (3, 1), None])
    assert [t.stride() for t in outputs[:2]] == [(3, 1), (3, 1)]
    assert moved.stride() == (1, 2)
    assert outputs[1] is kept
    assert outputs[2] == 7
    assert torch.equal(outputs[0], moved)
    outputs[0].sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 3), 2.0))
