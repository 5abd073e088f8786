"""Whose units and graphs are whose, by their keys."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from kcoord.backends.inductor.adapter import InductorBackend
from kcoord.backends.inductor.request import GRAPH, UNIT, Entry
from kcoord.keys.device import DeviceKey, GPUTarget


@pytest.mark.parametrize("kind", [UNIT, GRAPH])
def test_ranks_with_gpus_of_two_types_share_nothing(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Though torch's key were the same."""

    def digest(target: str, model: str, index: int) -> str:
        device = DeviceKey(GPUTarget.parse(target), index)
        monkeypatch.setattr("kcoord.backends.backend.current_device", lambda: device)
        monkeypatch.setattr("kcoord.keys.device.model_of", lambda _: model)
        return InductorBackend().key(Entry(kind, "torchs-key")).digest

    first = digest("cuda:80", "A100", 0)
    assert digest("cuda:90", "H100", 0) != first
    assert digest("cuda:80", "A30", 0) != first, "kernels are chosen for the model"
    assert digest("cuda:80", "A100", 1) == first, "torch's own key holds the index where it matters"
