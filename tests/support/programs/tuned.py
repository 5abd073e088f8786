"""An autotuned kernel on a GPU that is not there: real compiles, launches that do nothing, and measurements that are made up.

As a program, a rank: tuned.py [warm]. It launches, and prints one JSON line. It measures that the configuration whose BLOCK is
``$PREFERS`` is the fastest; with ``$GATE`` it says by GATE.<pid> that it measures, and goes on when GATE is there; with
``$INTERRUPT`` its first measurement is interrupted, and it launches again. A BLOCK above ``$LIMIT`` does not run on its GPU.
It launches for each tuning key of ``$MS``, and passes a tensor as ``$OPTION``. ``$INSTALL`` says whether kcoord is installed
``before`` the kernel is made, or ``after``.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if "MODEL" in os.environ:  # torch sees a GPU of this model
    import torch

    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=0: (9, 0)
    torch.cuda.get_device_properties = lambda device=0: SimpleNamespace(name=os.environ["MODEL"])

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

measured: list[int] = []
launched: list[dict[str, Any]] = []
heard: list[dict[str, Any]] = []
pruned: list[int] = []


class Gpu:
    """What Triton asks of a driver, for an sm_90."""

    def __init__(self) -> None:
        self.utils = self
        self.shared = int(os.environ.get("SHARED", "200000"))

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared}

    def threads(self, block: int) -> int:
        return 1024 if block <= int(os.environ.get("LIMIT", "1024")) else 0

    def load_binary(self, *arguments: Any) -> tuple[int, ...]:
        return 1, 1, 0, 0, self.threads(self.block)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        constants = {source.fn.arg_names[path[0]]: value for path, value in source.constants.items()}
        self.block = constants["BLOCK"]  # of what is loaded next

        def launch(*arguments: Any) -> None:
            if not self.threads(constants["BLOCK"]):  # Triton 3.4 looks only as it loads
                raise triton.runtime.errors.OutOfResources(128, 0, "threads")
            launched.append(constants)

        return launch

    def get_benchmarker(self) -> Any:
        return measure


class Tensor:
    dtype = "float32"

    def data_ptr(self) -> int:
        return 0


def measure(kernel_call: Any, quantiles: Any) -> list[float]:
    gate = os.environ.get("GATE")
    if gate and not measured:
        Path(f"{gate}.{os.getpid()}").touch()
        while not Path(gate).exists():
            time.sleep(0.005)
    if os.environ.pop("INTERRUPT", None):
        raise KeyboardInterrupt
    block = inspect.getclosurevars(kernel_call).nonlocals["config"].kwargs["BLOCK"]
    measured.append(block)
    kernel_call()
    return [1.0 if block == int(os.environ.get("PREFERS", "64")) else 2.0] * 3


def prune(configs: list[triton.Config], named_args: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    pruned.append(named_args["m"])
    return [config for config in configs if config.kwargs["BLOCK"] <= named_args["n"]]


BLOCKS = [int(block) for block in os.environ.get("BLOCKS", "32,64,128").split(",")]


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}) for block in BLOCKS],
    key=["m"],
    prune_configs_by={"early_config_prune": prune},
)
@triton.jit
def add(x, y, z, n, m, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(x + i, mask=i < n) + WIDTH
    if y is not None:
        found += tl.load(y + i, mask=i < n)
    if z is not None:
        found *= tl.load(z + i, mask=i < n)
    tl.store(x + i, found, mask=i < n)


def launch(m: int = 7) -> None:
    options = [Tensor() if os.environ.get("OPTION") == name else None for name in ("y", "z")]
    n, width = int(os.environ.get("N", "1024")), int(os.environ.get("WIDTH", "1"))
    add[(1,)](Tensor(), *options, n, m, WIDTH=width)


def main(how: str = "use") -> None:
    order = os.environ.get("INSTALL", "before")
    if order == "before":
        import kcoord

        kcoord.install()
    import tuned  # as the job's own module: what is in __main__ cannot be imported

    if order == "after":
        import kcoord

        kcoord.install()
    driver.set_active(tuned.Gpu())
    if hasattr(triton.knobs.autotuning, "listener"):
        triton.knobs.autotuning.listener = lambda **facts: tuned.heard.append(
            {"hit": facts["cache_hit"], "timings": len(facts["configs_timings"]), "best": str(facts["best_config"])}
        )
    report: Any = None
    if how == "warm":
        import kcoord

        report = kcoord.warmup(os.environ["PROFILE"])
    error = None
    try:
        if "INTERRUPT" in os.environ:
            with contextlib.suppress(KeyboardInterrupt):
                tuned.launch()
        for m in os.environ.get("MS", "7").split(","):
            for _ in range(2):
                tuned.launch(int(m))
    except triton.runtime.errors.OutOfResources as caught:
        error = str(caught)
    line = {
        "choice": tuned.add.best_config.kwargs["BLOCK"],
        "launched": tuned.launched[-1]["BLOCK"] if tuned.launched else None,
        "measured": sorted(tuned.measured),
        "first": tuned.measured[:1],
        "heard": tuned.heard,
        "timings": len(getattr(tuned.add, "configs_timings", ())),
        "pruned": tuned.pruned,
        "shared": hasattr(type(tuned.add).check_disk_cache, "__kcoord_stock__"),
        "error": error,
        "report": vars(report) if report else None,
    }
    if how == "warm" or "KCOORD_PROFILE" in os.environ:
        import kcoord

        kcoord.connect().close()
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    main(*sys.argv[1:])
