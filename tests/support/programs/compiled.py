"""A rank that trains small models under torch.compile, one after the other, and says what torch had to do for each.

``compiled.py JSON``: `models` are names of `MODELS`. `marks`: mark inputs as a GPU's compile does. `hold`: the first code
generation touches ``<hold>.began`` and waits for the file `hold`. `refuse`: the first one raises. `dies`: a rank is killed at its
third one, if torchrun has not restarted it yet. `alone`: a world of its own.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

wanted = json.loads(sys.argv[1])
if os.environ.get("STOCK") != "1":
    import kcoord

    kcoord.install()

import torch._functorch.aot_autograd as aot_autograd  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch._inductor import compile_fx, config  # noqa: E402
from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions  # noqa: E402

BATCH, WIDTH = 8, 16
counts: dict[str, int] = {}


class Block(nn.Module):
    def __init__(self, width: int, activation: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, width, bias=False), nn.Linear(width, WIDTH, bias=False)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return self.down(self.activation(hidden) if self.activation else hidden)


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Pictures(nn.Module):
    """Convolutions, whose outputs Inductor may lay out as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(2, 3, 4, 4)
        for layer in self.layers:
            x = layer(x)
        return x


def stack(first: int) -> Stack:
    """No two models have a graph in common."""
    return Stack(*(Block(first + 8 * number) for number in range(3)))


def distributed(model: nn.Module) -> nn.Module:
    dist._DEFAULT_FIRST_BUCKET_BYTES = 256
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1 / 1024)  # each weight is a bucket


def plain() -> tuple[nn.Module, Any]:
    return (model := stack(16)), torch.compile(model)


def ddp() -> tuple[nn.Module, Any]:
    return (model := stack(64)), torch.compile(distributed(model))


def convolutions() -> tuple[nn.Module, Any]:
    return (model := Pictures()), torch.compile(distributed(model))


def regional() -> tuple[nn.Module, Any]:
    model = stack(88)
    for block in model.blocks:
        block.compile()
    return model, model


def fsdp() -> tuple[nn.Module, Any]:
    from torch.distributed.fsdp import fully_shard

    model = stack(112)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    for block in model.blocks:
        block.compile()
    return model, model


def activated() -> tuple[nn.Module, Any]:
    """With C++ to build."""
    return (model := Stack(Block(WIDTH, torch.relu))), torch.compile(model)


def exactly(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):  # as Hugging Face's rotary embeddings
        return torch.relu(x)


def cast() -> tuple[nn.Module, Any]:
    return (model := Stack(Block(160, exactly))), torch.compile(model)


def dynamic() -> tuple[nn.Module, Any]:
    return (model := stack(136)), torch.compile(model, dynamic=True)


MODELS = {
    "plain": plain, "ddp": ddp, "convolutions": convolutions, "regional": regional, "fsdp": fsdp,
    "activated": activated, "cast": cast, "dynamic": dynamic,
}  # fmt: skip


def counted(owner: Any, name: str, what: Callable[..., str], before: Callable[[], None] = lambda: None) -> None:
    native = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        counts[what(*arguments)] = counts.get(what(*arguments), 0) + 1
        before()
        return native(*arguments, **keywords)

    setattr(owner, name, call)


def kind_of_build(builder: CppBuilder) -> str:
    """Torch also precompiles headers, and tries out what the processor can do."""
    is_kernel = isinstance(builder._build_option, CppTorchDeviceOptions)
    return "libraries" if is_kernel and builder.get_target_file_path().endswith(".so") else "preparations"


def before_code_generation() -> None:
    if wanted.get("dies") and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and counts["codegens"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    hold = wanted.pop("hold", None)
    if hold:
        Path(f"{hold}.began").touch()
        while not Path(hold).exists():
            time.sleep(0.01)
    if wanted.pop("refuse", False):
        raise NotImplementedError("no such operator")


def mark_inputs() -> None:
    native = compile_fx._compile_fx_inner

    def marking(gm: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        made = native(gm, inputs, *arguments, **keywords)
        for each in inputs:
            if isinstance(each, torch.Tensor):
                each._is_inductor_static = True
        return made

    compile_fx._compile_fx_inner = marking


def train(name: str) -> dict[str, Any]:
    torch._dynamo.reset()
    counts.clear()
    counters.clear()
    torch.manual_seed(0)
    config.fallback_by_default = name != "activated"  # no C++ to build for the others
    model, compiled = MODELS[name]()
    losses = []
    for step in (1, 2):
        batch = BATCH - 3 * (step - 1) if name == "dynamic" else BATCH
        width = 6 * WIDTH // BATCH if name == "convolutions" else WIDTH
        inputs = torch.linspace(-1, 1, batch * width).reshape(batch, width) * step
        loss = compiled(inputs).square().mean()
        loss.backward()
        losses.append(loss.item().hex())
    gradients = hashlib.sha256()
    for parameter in model.parameters():
        gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        gradients.update(gradient.detach().numpy().tobytes())
    return {
        **counts,
        "losses": losses,
        "gradients": gradients.hexdigest(),
        "hits": counters["aot_autograd"]["autograd_cache_hit"],
    }


def meeting() -> dict[str, Any]:
    """Ranks that no launcher started meet at a file."""
    if "MEETING" not in os.environ:
        return {}
    world = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    return {"init_method": f"file://{os.environ['MEETING']}", **world}


def main() -> None:
    counted(compile_fx, "fx_codegen_and_compile", lambda *_: "codegens", before_code_generation)
    counted(aot_autograd, "aot_stage1_graph_capture", lambda *_: "traces")
    counted(CppBuilder, "build", kind_of_build)
    for name, value in wanted.get("settings", {}).items():
        setattr(config, name, value)
    if wanted.get("marks"):
        mark_inputs()
    if wanted.get("alone"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    elif "RANK" in os.environ:
        dist.init_process_group("gloo", **meeting())
    for name in wanted["models"]:
        sys.stdout.write(json.dumps({"model": name, **train(name)}) + "\n")
    torch._dynamo.reset()
    gc.collect()  # DDP's reducer may wait for ever for a gloo group that is destroyed
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
