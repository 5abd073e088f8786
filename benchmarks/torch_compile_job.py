"""One rank of a torch.compile job, on GPUs or on the CPU. Run it with torchrun.

``--model gpt`` has another width in every block; ``loss`` is the same with its cross-entropy in the compiled graph; ``llama`` is
that of Hugging Face's transformers, with random weights. ``--wrap fsdp`` is FSDP2 in place of DDP, ``regional`` compiles each of
its layers alone, ``none`` is the bare model in each rank. ``--mode rank0`` lets rank 0 compile first, ``together`` all at once.

Rank 0 prints one line of JSON: wall seconds from barrier to barrier with one training step in between (the slowest rank's), and
those of the model and of the step alone; what torch did in all ranks together, the median of further steps in seconds,
the most bytes of tensors that are alive in one more step (the largest rank's), and the first loss to the bit.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

WORDS, FURTHER = 32_000, 5
counts = {"codegens": 0, "traces": 0, "builds": 0}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, number: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width + 64 * number), nn.Linear(4 * width + 64 * number, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, words: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.blocks = nn.ModuleList(Block(width, heads, number) for number in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class WithLoss(GPT):
    """Its logits, and their gradient, are the largest tensors of a step."""

    def forward(self, tokens: Tensor) -> Tensor:
        return cross_entropy(super().forward(tokens), tokens)


def cross_entropy(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


@functools.cache  # once
def count_work() -> None:
    """Once torch.compile has imported what it needs: that is part of the measured time."""
    from torch._functorch import aot_autograd
    from torch._inductor import compile_fx
    from torch._inductor.cpp_builder import CppBuilder

    count(compile_fx, "fx_codegen_and_compile", "codegens")
    count(aot_autograd, "aot_stage1_graph_capture", "traces")
    count(CppBuilder, "build", "builds")


def count(owner: Any, name: str, what: str) -> None:
    native = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        counts[what] += 1
        return native(*arguments, **keywords)

    setattr(owner, name, call)


def llama(layers: int, width: int, heads: int, words: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
        )
    )


MODELS: dict[str, Callable[[int, int, int, int], nn.Module]] = {"gpt": GPT, "loss": WithLoss, "llama": llama}


def layers_of(model: nn.Module) -> nn.ModuleList:
    return model.blocks if hasattr(model, "blocks") else model.model.layers


class Job:
    def __init__(self, args: argparse.Namespace, device: torch.device, wrap: str) -> None:
        model, layers, width, on_gpu = args.model, args.layers, args.width, device.type == "cuda"
        usual, heads, words, (batch, length) = (768, 12, WORDS, (4, 512)) if on_gpu else (64, 4, 512, (2, 32))
        self.has_loss = model == "loss"
        if self.has_loss and not on_gpu:
            words, (batch, length) = 8192, (4, 128)
        self.shape = (args.batch or batch, length)
        torch.manual_seed(0)
        self.device, self.words = device, words
        if width:  # billions of weights take a core minutes, and a GPU none
            with device:
                self.model = MODELS[model](layers, width, width // 128, words)
        else:
            self.model = MODELS[model](layers, usual, heads, words).to(device)
        if wrap == "ddp":
            size = {}
            if not on_gpu:  # as many units as blocks, though these are small
                size["bucket_cap_mb"], dist._DEFAULT_FIRST_BUCKET_BYTES = 0.15, 1 << 17
            self.model = nn.parallel.DistributedDataParallel(self.model, **size)
        if wrap in ("fsdp", "regional"):
            from torch.distributed.fsdp import fully_shard

            for layer in layers_of(self.model):
                fully_shard(layer)
            fully_shard(self.model)
        if wrap == "regional":
            for layer in layers_of(self.model):
                layer.compile(dynamic=args.dynamic)
        self.compiled = self.model if wrap == "regional" else torch.compile(self.model, dynamic=args.dynamic)

    def step(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, self.words, self.shape, generator=generator).to(self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            found = self.compiled(tokens)
            logits = getattr(found, "logits", found)  # transformers wrap them
            loss = logits if self.has_loss else cross_entropy(logits, tokens)
        loss.backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return loss

    def peak(self) -> int:
        """The most bytes of tensors that are alive at once in a step."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated()
        alive = sum(each.nbytes for p in self.model.parameters() for each in (p, p.grad) if each is not None)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            self.step()
        found = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
        return alive + max(itertools.accumulate(each.nbytes() for each in sorted(found, key=lambda e: e.start_ns())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["together", "rank0"], default="together")
    parser.add_argument("--model", choices=[*MODELS], default="gpt")
    parser.add_argument("--wrap", choices=["ddp", "fsdp", "regional", "none"], default="ddp")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=0, help="real models have 4096; 0: small")
    parser.add_argument("--batch", type=int, default=0, help="sequences in a step; 0: as usual")
    parser.add_argument("--dynamic", action="store_true", default=None, help="with symbolic sizes")
    parser.add_argument("--compiled-autograd", action="store_true", help="the backward is traced as it runs")
    args = parser.parse_args()
    torch._dynamo.config.compiled_autograd = args.compiled_autograd
    rank, on_gpu = int(os.environ["RANK"]), torch.cuda.is_available()
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.ones(8, device=device).sum().item()
    if on_gpu and int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus:
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")  # NCCL takes one rank a GPU
    dist.barrier()
    begun = time.perf_counter()
    if args.mode == "rank0":
        if rank == 0:
            first = Job(args, device, "none")
            count_work()
            first.step()
        dist.barrier()
    started = time.perf_counter()
    job = Job(args, device, args.wrap)
    made = time.perf_counter()
    count_work()
    imported = time.perf_counter()
    loss = job.step().item().hex()
    ended = time.perf_counter()
    mine = {"wall": ended - begun, "model": made - started, "first": ended - imported}
    steps = []
    for _ in range(FURTHER):
        before = time.perf_counter()
        job.step()
        steps.append(time.perf_counter() - before)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (mine, counts, statistics.median(steps), loss, job.peak()))
    if rank == 0:
        together = {what: sum(each[1][what] for each in found) for what in counts}
        step = max(each[2] for each in found)
        print(
            json.dumps(
                {
                    **{part: max(each[0][part] for each in found) for part in mine},
                    **together,
                    "step": step,
                    "peak": max(each[4] for each in found),
                    "losses": sorted({f[3] for f in found}),
                }
            )
        )
    dist.barrier()
    del job  # DDP's reducer may wait for ever for a gloo group that is destroyed
    torch._dynamo.reset()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
