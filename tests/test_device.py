"""The device key, read from a stand-in for torch: what matters is what is asked of it, and when."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kcoord.keys.device import CPU, DeviceKey, GPUTarget, Scope, current_device, scope_factors


class Cuda:
    def __init__(self, device: int = 0, bad_fork: bool = False) -> None:
        self.device, self.bad_fork = device, bad_fork

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        if self.bad_fork:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return self.device

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return (9, 0) if device < 4 else (10, 0)

    def get_device_name(self, device: int) -> str:
        return f"model of {device}"

    def get_device_properties(self, device: int) -> Any:
        return SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", warp_size=64)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=None)))
    return cuda


def test_without_torch_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert current_device() == CPU


def test_a_switch_of_device_moves_the_key_at_once(cuda: Cuda) -> None:
    assert current_device() == DeviceKey(GPUTarget("cuda", 90, 32), 0)
    cuda.device = 5
    assert current_device() == DeviceKey(GPUTarget("cuda", 100, 32), 5)


def test_an_amd_device_is_named_by_its_architecture_without_features(cuda: Cuda) -> None:
    sys.modules["torch"].version.hip = "6.4"
    assert current_device().target == GPUTarget("hip", "gfx942", 64)


def test_a_child_forked_after_cuda_was_initialized_gets_the_cpu_and_no_exception(cuda: Cuda) -> None:
    cuda.bad_fork = True
    assert current_device() == CPU


def test_scopes_hold_as_much_of_the_device_as_they_say(cuda: Cuda) -> None:
    device = current_device()
    assert scope_factors(Scope.TARGET, device) == {"target": device.target}
    assert scope_factors(Scope.MODEL, device) == {"target": device.target, "device_model": "model of 0"}
    assert scope_factors(Scope.DEVICE, device)["device_id"] == 0


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("cuda:90", GPUTarget("cuda", 90, 32)),
        ("hip:gfx942", GPUTarget("hip", "gfx942", 64)),
        ("hip:gfx1100", GPUTarget("hip", "gfx1100", 32)),
    ],
)
def test_a_target_is_parsed_as_it_is_written(text: str, target: GPUTarget) -> None:
    assert GPUTarget.parse(text) == target
    assert str(target) == text


@pytest.mark.parametrize("text", ["", "cuda", "cuda:sm90", "hip:942", "rocm:gfx942"])
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cuda:90"):
        GPUTarget.parse(text)
