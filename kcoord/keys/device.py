"""The device that a kernel is compiled for, read live at the call, and how much of it a key holds.

A switch of device between two calls therefore moves the key of the second call. Nothing here imports torch: a process that has
not imported it does not run on a GPU through it.
"""

from __future__ import annotations

import enum
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcoord.errors import KeyFactorError

_SM = re.compile(r"[0-9]{2,3}[af]?")


class Scope(enum.Enum):
    """The share of the device key that belongs in an artifact's key."""

    TARGET = "target"
    """The bytes depend on the GPUTarget alone: a cubin, a hsaco."""
    MODEL = "model"
    """They also depend on the device model: autotune choices."""
    DEVICE = "device"
    """They also depend on the ordinal: the index is baked into the code. The default for unknown code."""


@dataclass(frozen=True)
class GPUTarget:
    """The GPU that code is generated for; the same three values as Triton's class of this name.

    `arch` is ``90``, ``"90a"`` (with the features of this architecture alone), ``"100f"`` (of its family) or ``"gfx942"``. Equal
    targets have equal code: ``90`` and ``"90a"`` are two targets, of one GPU.
    """

    backend: str
    arch: int | str
    warp_size: int

    @classmethod
    def parse(cls, text: str) -> GPUTarget:
        """``cuda:90``, ``cuda:90a``, ``cuda:100f`` or ``hip:gfx942``. Raises ValueError on anything else."""
        backend, _, arch = text.partition(":")
        if backend == "cuda" and _SM.fullmatch(arch):
            return cls(backend, int(arch) if arch.isdecimal() else arch, 32)
        if backend == "hip" and arch.startswith("gfx"):
            return cls(backend, arch, 32 if arch.startswith(("gfx10", "gfx11", "gfx12")) else 64)
        raise ValueError(f"{text!r} is no target: write cuda:90, cuda:90a or hip:gfx942")

    def __str__(self) -> str:
        return f"{self.backend}:{self.arch}"


@dataclass(frozen=True)
class DeviceKey:
    """`(GPUTarget, device_id)`: every in-memory handle belongs to one."""

    target: GPUTarget
    device_id: int

    def __str__(self) -> str:
        return f"{self.target}#{self.device_id}"


CPU = DeviceKey(GPUTarget("cpu", platform.machine(), 0), 0)


class _Seen:
    """Answers of one torch, kept: the properties of a GPU do not change while the process lives."""

    __slots__ = ("cpu_only", "devices", "models", "torch")

    def __init__(self, torch: Any) -> None:
        version = getattr(torch, "version", None)
        built_for = (getattr(version, "cuda", "?"), getattr(version, "hip", "?"))
        self.torch = torch
        self.cpu_only = torch is None or built_for == (None, None)
        self.devices: dict[int, DeviceKey] = {}  # once there is one CUDA is initialized, and stays available
        self.models: dict[int, str] = {}


_seen = _Seen(None)


def _forget_after_fork() -> None:
    global _seen
    _seen = _Seen(None)  # CUDA does not survive a fork


os.register_at_fork(after_in_child=_forget_after_fork)


def _meet(torch: Any) -> _Seen:
    global _seen
    seen = _Seen(torch)
    if torch is None or hasattr(torch, "version"):  # else its import is under way, and it may say more
        _seen = seen
    return seen


def _available(torch: Any) -> bool:
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and bool(cuda.is_available())


def current_device() -> DeviceKey:
    """The calling thread's current device; the CPU if torch is not imported, or sees no GPU that it can use.

    Read at each call, so that a switch of device is seen at once, and cheap enough for a launch path. Initializes CUDA in
    this process, as `torch.cuda.current_device` does. A child that was forked after that cannot use a GPU, and gets the CPU.
    """
    torch, seen = sys.modules.get("torch"), _seen
    if seen.torch is not torch:
        seen = _meet(torch)
    if seen.cpu_only or not (seen.devices or _available(torch)):
        return CPU
    try:
        device_id = seen.torch.cuda.current_device()
    except RuntimeError:  # forked after CUDA was initialized, or the driver refuses
        return CPU
    return seen.devices.get(device_id) or seen.devices.setdefault(device_id, _device(torch, device_id))


def _device(torch: Any, device_id: int) -> DeviceKey:
    if torch.version.hip:
        properties = torch.cuda.get_device_properties(device_id)
        arch = properties.gcnArchName.partition(":")[0]
        return DeviceKey(GPUTarget("hip", arch, properties.warp_size), device_id)
    major, minor = torch.cuda.get_device_capability(device_id)
    return DeviceKey(GPUTarget("cuda", major * 10 + minor, 32), device_id)


def model_of(device: DeviceKey) -> str:
    """The device's model: its name, compute units, memory in GiB and the product's PCI id, for example ``NVIDIA H100 80GB HBM3,
    132 units, 79 GiB, 0x2330``. The processor's architecture for a CPU.

    Some AMD GPUs have no name, and partitions of a GPU have the name of the whole. An unknown part is a question mark.
    """
    torch, seen = sys.modules.get("torch"), _seen
    if seen.torch is not torch:
        seen = _meet(torch)
    if device.target.backend == "cpu" or seen.cpu_only:
        return platform.machine()
    if device.device_id not in seen.models:
        if not _available(torch):
            return platform.machine()
        seen.models[device.device_id] = _model(seen.torch.cuda.get_device_properties(device.device_id))
    return seen.models[device.device_id]


def _model(properties: Any) -> str:
    """`properties` are torch's."""
    units, memory = getattr(properties, "multi_processor_count", "?"), getattr(properties, "total_memory", None)
    gib = "?" if memory is None else round(memory / (1 << 30))
    return f"{getattr(properties, 'name', '') or '?'}, {units} units, {gib} GiB, {_product(properties)}"


def _product(properties: Any) -> str:
    """The product's id on the PCI bus. Torch's ``pci_device_id`` is the slot."""
    try:
        domain, bus, slot = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
        return Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{slot:02x}.0/device").read_text().strip()
    except (AttributeError, OSError):  # an older torch; sysfs is hidden
        return "?"


def scope_factors(scope: Scope, device: DeviceKey) -> dict[str, Any]:
    """The factors that `scope` adds to a key on `device`. Raises `KeyFactorError` for what is no `Scope`, such as its name."""
    if not isinstance(scope, Scope):
        raise KeyFactorError(f"scope={scope!r}: it must be kcoord.Scope.TARGET, MODEL or DEVICE")
    factors: dict[str, Any] = {"target": device.target}
    if scope is not Scope.TARGET:
        factors["device_model"] = model_of(device)
    if scope is Scope.DEVICE:
        factors["device_id"] = device.device_id
    return factors
