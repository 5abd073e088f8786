"""The device key, read from a stand-in for torch: what matters is what is asked of it, and when."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kcoord.keys.device import CPU, DeviceKey, GPUTarget, Scope, current_device, model_of, scope_factors


class Cuda:
    def __init__(self, device: int = 0, bad_fork: bool = False) -> None:
        self.device, self.bad_fork, self.available = device, bad_fork, True
        self.asked: list[str] = []
        self.names: dict[int, str] = {}
        self.parts: dict[str, int] = {"multi_processor_count": 132, "total_memory": 85_000_000_000}

    def is_available(self) -> bool:
        self.asked.append("available")
        return self.available

    def current_device(self) -> int:
        if self.bad_fork:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return self.device

    def get_device_capability(self, device: int) -> tuple[int, int]:
        self.asked.append(f"capability of {device}")
        return (9, 0) if device < 4 else (10, 0)

    def get_device_properties(self, device: int) -> Any:
        self.asked.append(f"properties of {device}")
        amd = {"gcnArchName": "gfx942:sramecc+:xnack-", "warp_size": 64}
        return SimpleNamespace(name=self.names.get(device, "H100"), **amd, **self.parts)


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


def test_what_does_not_change_while_a_process_lives_is_asked_once(cuda: Cuda) -> None:
    for device in (0, 5, 0, 5):
        cuda.device = device
        assert current_device().device_id == device
        assert model_of(current_device()).startswith("H100, ")
    asked = [question for question in cuda.asked if question != "available"]
    assert sorted(asked) == ["capability of 0", "capability of 5", "properties of 0", "properties of 5"]
    before = len(cuda.asked)
    assert current_device().target.arch == 100
    assert len(cuda.asked) == before


def test_gpus_that_are_unhidden_before_cuda_is_initialized_are_seen(cuda: Cuda) -> None:
    cuda.available = False
    assert current_device() == CPU
    cuda.available = True
    assert current_device().target.arch == 90


def test_a_torch_that_is_imported_later_is_seen(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> None:
    torch = sys.modules["torch"]
    monkeypatch.delitem(sys.modules, "torch")
    assert current_device() == CPU
    half_imported = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch", half_imported)
    assert current_device() == CPU
    half_imported.version, half_imported.cuda = torch.version, torch.cuda
    assert current_device().target.arch == 90


def test_a_torch_without_gpu_support_is_not_asked_even_if_its_import_was_under_way(
    monkeypatch: pytest.MonkeyPatch, cuda: Cuda
) -> None:
    half_imported = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "torch", half_imported)
    assert current_device() == CPU
    half_imported.version, half_imported.cuda = SimpleNamespace(cuda=None, hip=None), cuda
    assert current_device() == CPU
    assert cuda.asked == []


def test_threads_have_devices_of_their_own(cuda: Cuda) -> None:
    chosen = threading.local()
    cuda.current_device = lambda: chosen.device  # type: ignore[method-assign]
    found: dict[int, DeviceKey] = {}

    def rank(device: int) -> None:
        chosen.device = device
        for _ in range(200):
            found[device] = current_device()
            assert found[device].device_id == device

    threads = [threading.Thread(target=rank, args=(device,)) for device in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[device].target.arch for device in range(8)] == [90] * 4 + [100] * 4


def test_a_forked_child_believes_nothing_that_its_parent_saw(cuda: Cuda) -> None:
    assert current_device().target.arch == 90
    child = os.fork()
    if child == 0:
        try:
            cuda.get_device_capability = lambda device: (10, 0)  # type: ignore[method-assign]
            os._exit(0 if current_device().target.arch == 100 else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_amd_device_is_named_by_its_architecture_without_features(cuda: Cuda) -> None:
    sys.modules["torch"].version.hip = "6.4"
    assert current_device().target == GPUTarget("hip", "gfx942", 64)


def test_a_child_forked_after_cuda_was_initialized_gets_the_cpu_and_no_exception(cuda: Cuda) -> None:
    cuda.bad_fork = True
    assert current_device() == CPU


def test_a_model_is_told_from_others_of_its_name_and_architecture(cuda: Cuda) -> None:
    def models() -> set[str]:
        sys.modules["torch"] = SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=None))  # another process
        return {model_of(DeviceKey(GPUTarget("hip", "gfx950", 64), n)) for n in range(8)}

    seen = models()
    assert len(seen) == 1, "eight equal GPUs are one model"
    cuda.names = dict.fromkeys(range(8), "")  # as an MI350X says
    nameless = models()
    for part in ({"multi_processor_count": 33}, {"total_memory": 36 << 30}):  # partitions of it
        before, cuda.parts = cuda.parts, cuda.parts | part
        assert models() not in (seen, nameless)
        cuda.parts = before
    cuda.parts = {}
    assert models() == {"?, ? units, ? GiB, ?"}


def test_a_product_is_known_by_its_place_on_the_pci_bus(cuda: Cuda) -> None:
    devices = sorted(Path("/sys/bus/pci/devices").glob("*:*:*.0"))
    if not devices:
        pytest.skip("this machine shows no PCI bus")
    domain, bus, slot = (int(part, 16) for part in devices[0].name.partition(".")[0].split(":"))
    cuda.parts |= {"pci_domain_id": domain, "pci_bus_id": bus, "pci_device_id": slot}
    assert model_of(current_device()).endswith(f", {(devices[0] / 'device').read_text().strip()}")


def test_scopes_hold_as_much_of_the_device_as_they_say(cuda: Cuda) -> None:
    device = current_device()
    assert scope_factors(Scope.TARGET, device) == {"target": device.target}
    assert scope_factors(Scope.MODEL, device) == {"target": device.target, "device_model": "H100, 132 units, 79 GiB, ?"}
    assert scope_factors(Scope.DEVICE, device)["device_id"] == 0
