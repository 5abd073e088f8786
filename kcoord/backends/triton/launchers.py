"""Building a kernel's launcher before the kernel is launched: while another rank compiles it, and when its recipe is replayed.

Up to Triton 3.6, the first launch of a kernel of a new signature runs the C compiler: some 0.2 s in which all ranks wait once
more. What a launcher depends on is known before its kernel is there. It is built as it always is, by Triton, through its cache;
when it is needed, it is there. Only a replay that waits for others' compiles waits for a launcher that another process builds.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton

from kcoord.backends.fail_open import fails_open
from kcoord.backends.triton.request import Settled, purpose

_CLASSES = {"cuda": ("nvidia", "CudaLauncher"), "hip": ("amd", "HIPLauncher")}
_DEVICES = {"cuda": ("/dev/nvidiactl", "/dev/dxg"), "hip": ("/dev/kfd", "/dev/dxg")}
"""There if the machine has such a GPU. Asking Triton or torch calls cuInit, after which no forked child can use the GPU."""


class _Metadata:
    """Stands for a kernel's metadata: the part of it that is in a launcher's C code."""

    tensordesc_meta = None
    cluster_dims = (1, 1, 1)

    def __init__(self, warp_size: int) -> None:
        self.warp_size = warp_size

    def __getattr__(self, name: str) -> int:
        return 0


@fails_open(lambda source, target: None)
def begin(source: Any, target: Any) -> None:
    """Begin to build the launcher of `source` for a `target` that this process runs on, in a thread."""
    driver = _driver()
    launcher = getattr(driver, "launcher_cls", None)
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_initialized():
        return  # asking for the target would
    if driver is not None and _is_known(launcher, source.signature) and driver.get_current_target() == target:
        threading.Thread(target=_build, args=(launcher, source, target.warp_size, False), daemon=True).start()


def _driver() -> Any | None:
    """The driver that this process has begun to use; none is started, as asking for `active` would."""
    config = triton.runtime.driver
    if hasattr(config, "_active"):
        return config._active
    active = config.active  # Triton 3.4: a proxy, which is empty until it is used, or a driver that was set
    return vars(active).get("_obj") if "_init_fn" in vars(active) else active


@fails_open(lambda source, target, waits: None)
def build(source: Any, target: Any, waits: bool) -> None:
    """Build the launcher of `source` if this machine has a GPU of `target`'s kind. CUDA is not initialized, nor looked for.

    If another process builds it: returns at once, or with `waits` when it is there.
    """
    kind, name = _CLASSES.get(target.backend, ("", ""))
    backend = triton.backends.backends.get(kind)
    launcher = getattr(sys.modules.get(backend.driver.__module__), name, None) if backend is not None else None
    asked = (waits, name, *map(str, source.signature.values()))
    if asked not in _asked and _is_known(launcher, source.signature) and _has_gpu(target.backend):
        _asked.add(asked)
        _build(launcher, source, target.warp_size, waits)


_asked: set[tuple[Any, ...]] = set()
"""The signatures for which `build` has been called in this process: most kernels of a job share a few."""


def _has_gpu(backend: str) -> bool:
    return any(Path(device).exists() for device in _DEVICES[backend])


def _is_known(launcher: Any, signature: Mapping[Any, Any]) -> bool:
    """True if there is C code to build, and it is known: that of a tensor descriptor depends on the compiled kernel."""
    builds = hasattr(sys.modules.get(getattr(launcher, "__module__", "")), "make_launcher")
    return builds and not any("tensordesc" in str(kind) for kind in signature.values())


@fails_open(lambda launcher, source, warp_size, waits: None)
def _build(launcher: Any, source: Any, warp_size: int, waits: bool) -> None:
    with contextlib.suppress(Settled), purpose.being(prepares=True, waits=waits):
        launcher(source, _Metadata(warp_size))
