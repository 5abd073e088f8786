"""The answers of a GPU: ``$STANDIN_ARCH`` is its architecture."""

from __future__ import annotations

import os
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class StandIn(DriverBase):  # type: ignore[misc]
    def __init__(self) -> None:
        self.utils = self

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(ty))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(os.environ["STANDIN_ARCH"]), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 100_000, "max_num_regs": 65_536, "warpSize": 32, "multiprocessor_count": 1}

    def load_binary(self, *arguments: Any) -> tuple[int, ...]:
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: None
