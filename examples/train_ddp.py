"""Train a small transformer with DDP and hand-written Triton kernels: ``torchrun --nproc-per-node 4 examples/train_ddp.py``.

An ordinary training script, which uses no compile cache but Triton's own. On GPUs the kernels run, and are
checked against PyTorch. On a machine without a GPU the model trains with PyTorch's operators, and the same kernels are
compiled ahead of time for an NVIDIA and an AMD target, so that the compile phase is real there, too.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import kernels
from kernels import STAGES, Stage

VOCABULARY, CLASSES = 64, 16
HEADS = 4
BATCH = 16


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, stage: Stage) -> None:
        super().__init__()
        self.stage = stage
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))

    def forward(self, x: Tensor) -> Tensor:
        return kernels.linear(x, self.weight, self.stage)


class LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return kernels.layer_norm(x, self.weight, self.bias)


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each after a layer norm and with a residual."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        width = stage.width
        self.attention_norm, self.mlp_norm = LayerNorm(width), LayerNorm(width)
        self.qkv = Linear(width, 3 * width, stage)
        self.out = Linear(width, width, stage)
        self.up = Linear(width, 2 * width, stage)
        self.down = Linear(2 * width, width, stage)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = kernels.softmax(q @ k.transpose(-1, -2), scale=1 / math.sqrt(width // HEADS))
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Classifier(nn.Module):
    """A pyramid: every stage halves the sequence by averaging neighbours, and doubles the width."""

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, stages[0].width)
        self.blocks = nn.ModuleList(Block(stage) for stage in stages)
        self.widen = nn.ModuleList(Linear(a.width, b.width, b) for a, b in itertools.pairwise(stages))
        self.head = nn.Linear(stages[-1].width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(tokens))
        for widen, block in zip(self.widen, self.blocks[1:], strict=True):
            x = block(widen(x.unflatten(1, (-1, 2)).mean(2)))
        return self.head(x.mean(1))


class Batches:
    """Endless synthetic data: a class is a distribution over tokens, and the task is to name the class of a text."""

    def __init__(self, sequence: int, rank: int, device: torch.device) -> None:
        same_everywhere = torch.Generator().manual_seed(1)
        self.distributions = torch.softmax(torch.randn(CLASSES, VOCABULARY, generator=same_everywhere), dim=-1)
        self.generator = torch.Generator().manual_seed(100 + rank)
        self.sequence, self.device = sequence, device

    def next(self) -> tuple[Tensor, Tensor]:
        labels = torch.randint(CLASSES, (BATCH,), generator=self.generator)
        probabilities = self.distributions[labels]
        tokens = torch.multinomial(probabilities, self.sequence, replacement=True, generator=self.generator)
        return tokens.to(self.device), labels.to(self.device)


class CompileCounter:
    """Counts Triton's compiles and cache hits."""

    def __init__(self) -> None:
        self.hashes: set[str] = set()
        self.compiled = self.loaded = 0
        triton.knobs.compilation.listener = self

    def __call__(self, *, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        self.hashes.add(metadata["hash"])
        self.loaded += cache_hit
        self.compiled += not cache_hit


def compile_everything(model: nn.Module, batches: Batches, wanted: int) -> None:
    """On a GPU one step, which compiles the kernels that it launches; elsewhere `wanted` kernels ahead of time."""
    if batches.device.type == "cuda":
        tokens, labels = batches.next()
        F.cross_entropy(model(tokens), labels).backward()
        model.zero_grad()
        torch.cuda.synchronize()
        return
    for kernel, constants, target in list(kernels.ahead_of_time())[:wanted]:
        kernels.compile_ahead(kernel, constants, target)


def train(model: nn.Module, batches: Batches, steps: int, rate: float) -> list[float]:
    """Returns the loss of every step, averaged over the ranks."""
    parallel = DistributedDataParallel(model, device_ids=[batches.device] if batches.device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=rate)
    losses = []
    for step in range(steps):
        tokens, labels = batches.next()
        loss = F.cross_entropy(parallel(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        if dist.get_rank() == 0 and (step % 5 == 0 or step == steps - 1):
            print(f"step {step:3d}  loss {losses[-1]:.4f}", flush=True)
    return losses


def arguments() -> argparse.Namespace:
    available = len(list(kernels.ahead_of_time()))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="default: %(default)s")
    parser.add_argument(
        "--kernels",
        type=int,
        default=20,
        metavar="N",
        help=f"how many distinct kernels, 1 to {available}: the model gets as many stages as that takes; "
        "on a GPU all kernels of these stages are compiled, for that GPU alone, so half as many (default: %(default)s)",
    )
    options = parser.parse_args()
    if not 1 <= options.kernels <= available:
        parser.error(f"--kernels {options.kernels}: 1 to {available}")
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: at least 1")
    return options


def main() -> None:
    options = arguments()
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start me with torchrun: torchrun --standalone --nproc-per-node 4 examples/train_ddp.py")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    nccl = gpus >= local_world  # NCCL refuses two ranks on one GPU
    dist.init_process_group("nccl" if nccl else "gloo", device_id=device if nccl else None)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    per_stage = len(STAGES[0].kernels()) * len(kernels.TARGETS)
    stages = STAGES[: math.ceil(options.kernels / per_stage)]
    model = Classifier(stages).to(device)
    batches = Batches(stages[0].sequence, rank, device)

    counter = CompileCounter()
    dist.barrier()
    started = time.perf_counter()
    compile_everything(model, batches, options.kernels)
    seconds = time.perf_counter() - started
    dist.barrier()
    if gpus:
        for stage in stages:
            kernels.check(stage, device)
    if rank == 0:
        where = torch.cuda.get_device_name(device) if gpus else "no GPU: compiled ahead of time"
        print(f"rank 0 has {len(counter.hashes)} kernels after {seconds:.2f} s ({where})", flush=True)

    losses = train(model, batches, options.steps, options.learning_rate)

    # every rank asks for the same kernels
    totals = torch.tensor([counter.compiled, counter.loaded], dtype=torch.float64, device=device)
    largest = torch.tensor([len(counter.hashes), seconds], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if rank == 0:
        summary = {
            "world": world,
            "kernels": int(largest[0]),
            "compiled": int(totals[0]),
            "loaded": int(totals[1]),
            "compile_wall_seconds": round(float(largest[1]), 3),
            "loss_first": round(losses[0], 4),
            "loss_last": round(losses[-1], 4),
        }
        print(json.dumps(summary), flush=True)
    gc.collect()  # DDP is garbage in a cycle, and the group's threads would outlive the interpreter with it (SIGABRT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
