"""How a row of Triton is compiled: by launching it, and by `triton.compile`. For GPUs that are not there.

With ``STALE_MODE=oracle`` it is launched alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor

from tests.stale.triton_rows import ROWS as ROWS

os.environ["REAL_PTXAS"] = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas")


class StandIn:
    """What Triton asks of a driver before it launches."""

    def __init__(self) -> None:
        self.targets = {0: GPUTarget("cuda", 90, 32), 1: GPUTarget("cuda", 80, 32), 2: GPUTarget("hip", "gfx942", 64)}
        self.device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.targets[self.device]


_gpus = StandIn()
driver.set_active(_gpus)
for _arch in (80, 90):
    # asks ptxas for its version, once per process: before any row does
    make_backend(GPUTarget("cuda", _arch, 32)).hash()


@contextlib.contextmanager
def device(named: str | None) -> Iterator[None]:
    """The device and its target, as in ``cuda:90#0``, until the end of the block."""
    target, _, number = (named or "cuda:90#0").partition("#")
    backend, _, arch = target.partition(":")
    chosen = GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)
    _gpus.device = int(number)
    usual, _gpus.targets[_gpus.device] = _gpus.targets[_gpus.device], chosen
    try:
        yield
    finally:
        _gpus.targets[_gpus.device], _gpus.device = usual, 0


class _Int32:
    def __str__(self) -> str:
        return "torch.int32"


def _launched(kernel: Any, **constants: Any) -> Any:
    return kernel.warmup(MockTensor(_Int32()), grid=(1,), **constants)


def _compiled(kernel: Any, **constants: Any) -> Any:
    """`triton.compile` of what a launch with a pointer to int32, aligned to 16 bytes, would compile."""
    pointer, *others = kernel.params
    options = {name: constants.pop(name) for name in ("extern_libs",) if name in constants}
    constants = {p.name: constants.get(p.name, p.default) for p in others}
    signature = {pointer.name: "*i32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature, constants, {(0,): [["tt.divisibility", 16]]})
    return triton.compile(source, target=_gpus.get_current_target(), options=options)


def _way(launch: Callable[..., Any]) -> Callable[[str, dict[str, Any]], str]:
    """The text of the last readable stage, without comments, and the digest of the binary."""

    def code(call: str, namespace: dict[str, Any]) -> str:
        asm = eval(call, {**namespace, "launch": launch}).asm
        text = asm["ptx"] if "ptx" in asm else asm["amdgcn"]
        binary = asm["cubin"] if "cubin" in asm else asm["hsaco"]
        return f"{text}\n{hashlib.sha256(binary).hexdigest()}"

    return code


WAYS = {"launch": _way(_launched)}
if os.environ.get("STALE_MODE") != "oracle":  # which would compile the same code again
    WAYS["compile"] = _way(_compiled)
