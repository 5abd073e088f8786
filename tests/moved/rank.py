"""A rank whose GPU is not there: it compiles each model of `MODELS` for ``cuda:STAND_IN_GPU``, on fake tensors, and runs none.

For each it prints how often torch traced and generated code, and the code that torch loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

GPU = int(os.environ["STAND_IN_GPU"])
TIMES = {"plain": 1.0, "padded": float(os.environ.get("STAND_IN_PADDED", "2"))}  # milliseconds of a matrix product
MODELS: dict[str, Callable[[torch.device], Tensor]] = {}
F = nn.functional


class Guard:
    def __init__(self, index: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


def stand_in() -> None:
    """Let torch and Triton take this machine for one with 8 H100s."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.graph import GraphLowering
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses import fake_tensor
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget

    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, warp_size=32,
        regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, L2_cache_size=50 << 20,
        gcnArchName="sm_90", shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472, is_integrated=0, is_multi_gpu_board=0,
    )  # fmt: skip

    def answer(value: Any) -> Any:
        return staticmethod(lambda *args, **kwargs: value)

    stream = SimpleNamespace(cuda_stream=0, device=torch.device("cuda", GPU))
    for owner, answers in (
        (torch.cuda, {
            "is_available": True, "device_count": 8, "_lazy_init": None, "init": None, "is_initialized": True,
            "current_device": GPU,
            "get_device_properties": properties, "get_device_capability": (9, 0), "get_device_name": properties.name,
            "is_bf16_supported": True, "synchronize": None, "set_device": None, "memory_allocated": 0, "current_stream": stream,
            "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
        }),
        (CudaInterface, {
            "is_available": True, "device_count": 8, "current_device": GPU, "get_device_properties": properties,
            "get_raw_stream": 0, "get_compute_capability": 90, "synchronize": None, "exchange_device": GPU,
            "maybe_exchange_device": GPU,
            "is_triton_capable": True, "raise_if_triton_unavailable": None,
        }),
        (CudaInterface.Worker, {"current_device": GPU, "get_device_properties": properties}),
        (torch.accelerator, {
            "is_available": True, "device_count": 8, "current_device_index": GPU, "current_accelerator": torch.device("cuda"),
        }),
        (torch._C, {
            "_cuda_getDevice": GPU, "_cuda_exchangeDevice": GPU, "_cuda_maybeExchangeDevice": GPU, "_cuda_setDevice": None,
            "_cuda_getCurrentRawStream": 0,
        }),
        (_triton, {"has_triton": True}),
        (triton_helpers, {"set_driver_to_gpu": None}),
        (fake_tensor, {"init_gpu_context": None}),
        (CachingAutotuner, {"_dynamic_scale_rblock": None}),
    ):  # fmt: skip
        for name, value in answers.items():
            setattr(owner, name, answer(value) if isinstance(owner, type) else answer(value).__func__)
    torch.cuda.device = torch.cuda._DeviceGuard = CudaInterface.device = Guard  # type: ignore[attr-defined,assignment,misc]
    torch.cuda.default_generators = tuple(torch.Generator(f"cuda:{index}") for index in range(8))
    limits = {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: GPU,
        get_active_torch_device=lambda: torch.device("cuda", GPU), get_device_interface=lambda: torch.cuda,
        launcher_cls=lambda source, metadata: lambda *args, **kwargs: None,
        utils=SimpleNamespace(get_device_properties=lambda device: limits, load_binary=lambda *args: (0, 0, 32, 0, 1024)),
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)

    def launchers(tuner: Any) -> None:
        results = tuner.compile_results
        tuner.launchers = [SimpleNamespace(config=each.config, n_regs=0, n_spills=0, shared=0) for each in results]

    CachingAutotuner._make_launchers = launchers  # type: ignore[method-assign]
    GraphLowering.save_output_code = staticmethod(codes.append)  # type: ignore[assignment]
    CompiledFxGraph.__call__ = not_run  # type: ignore[method-assign]
    pad_mm.get_do_bench = lambda: lambda run: TIMES["padded" if run.__name__ == "pad_bench_fn" else "plain"]


class NotRunError(Exception):
    pass


def not_run(graph: Any, inputs: Any) -> Any:
    raise NotRunError


codes: list[str] = []
counts: Counter[str] = Counter()


def count(owner: Any, name: str, what: str) -> None:
    native = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        counts[what] += 1
        return native(*args, **kwargs)

    setattr(owner, name, call)


def model(run: Callable[[torch.device], Any]) -> None:
    MODELS[run.__name__] = run


def given(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*(shape or (32, 64)), device=device, requires_grad=True)


@model
def mlp(device: torch.device) -> Any:
    with device:
        layers = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU())
    return torch.compile(lambda x: (layers(x) + torch.arange(256, device=x.device)).sum())(given(device))


@model
def dropout(device: torch.device) -> Any:
    with device:
        layers = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3))
    return torch.compile(lambda x: layers(x).square().mean())(given(device))


@model
def recomputed_dropout(device: torch.device) -> Any:
    from torch.utils.checkpoint import checkpoint

    with device:
        layers = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3))
    return torch.compile(lambda x: checkpoint(layers, x, use_reentrant=False).square().mean())(given(device))


@model
def constants(device: torch.device) -> Any:
    return torch.compile(lambda x: (x + torch.tensor([1.0, 2.0] * 32, device=str(device))).sum())(given(device))


@model
def half_precision(device: torch.device) -> Any:
    with device:
        layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return torch.compile(lambda x: layers(x).float().square().mean())(given(device))


@model
def large_reduction(device: torch.device) -> Any:
    return torch.compile(lambda x: x.sin().sum() + x.amax())(given(device, 1 << 22))


@model
def product(device: torch.device) -> Any:
    """Torch pads it if that is faster."""
    return torch.compile(lambda x, y: (x @ y).sum())(given(device, 3, 64), given(device, 64, 256))


@model
def another_with_the_product(device: torch.device) -> Any:
    return torch.compile(lambda x, y: (x @ y).exp().sum())(given(device, 3, 64), given(device, 64, 256))


@model
def dynamic_sizes(device: torch.device) -> Any:
    with device:
        layers = nn.Linear(64, 64)
    x = given(device)
    torch._dynamo.mark_dynamic(x, 0)
    return torch.compile(lambda x: layers(x).relu().sum())(x)


@model
def cuda_graphs(device: torch.device) -> Any:
    return torch.compile(lambda x: x.sin().sum(), options={"triton.cudagraphs": True})(given(device))


def main() -> None:
    import torch._functorch.aot_autograd as aot_autograd
    from torch._inductor import compile_fx
    from torch._subclasses import FakeTensorMode

    import kcoord
    from kcoord.backends.inductor import moving

    stand_in()
    moving.RELEASES = frozenset({torch.__version__.partition("+")[0]})  # that is the question
    kcoord.install()
    count(compile_fx, "fx_codegen_and_compile", "codegens")
    count(aot_autograd, "aot_stage1_graph_capture", "traces")
    for name in sys.argv[1:] or MODELS:
        if child := os.fork():  # a graph that is not run leaves torch in between
            os.waitpid(child, 0)
            continue
        with FakeTensorMode(), torch.enable_grad(), contextlib.suppress(NotRunError):
            MODELS[name](torch.device("cuda", GPU))
        print(json.dumps({"model": name, "codes": codes, **counts}), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
