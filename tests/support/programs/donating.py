"""Trains a language model whose loss is in the compiled graph, and prints what each step computed: on the CPU to the bit.

``donating.py JSON``: `steps` are names: ``once``, ``retained`` (a second backward follows), ``graph`` (with `create_graph`),
``measured`` (as ``once``, with the most bytes that it allocated). `variants` are of `VARIANTS`. `cached` is false to have units
cached by nobody.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import os
import sys
from typing import Any

if os.environ.get("STOCK") != "1":
    import kcoord

    kcoord.install()

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORDS, TOKENS = (8192, 4096) if DEVICE == "cuda" else (2048, 64)
VARIANTS = ("float32", "bfloat16", "ddp")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.Linear(32, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.relu(self.up(self.embedding(tokens))))
        return nn.functional.cross_entropy(logits.float(), tokens)


def digest(tensors: Any) -> Any:
    """On a GPU the tensors' norms: its sums depend on the order of its threads."""
    if DEVICE == "cuda":
        return [each.norm().item() for each in tensors]
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()


def step(name: str, model: nn.Module, compiled: Any, variant: str) -> list[Any]:
    model.zero_grad(set_to_none=True)
    weights = list(model.parameters())
    # a reducer of DDP takes one backward of each forward
    apart = compiled.no_sync() if variant == "ddp" and name != "once" else contextlib.nullcontext()
    autocast = torch.autocast(DEVICE, torch.bfloat16) if variant == "bfloat16" else contextlib.nullcontext()
    with apart:
        with autocast:
            loss = compiled(torch.arange(TOKENS, device=DEVICE) * 7 % WORDS)
        found = [loss.item()]
        if name == "retained":
            loss.backward(retain_graph=True)
            found.append(digest(weight.grad for weight in weights))
        elif name == "graph":
            found.append(digest(torch.autograd.grad(loss, weights, create_graph=True)))
        loss.backward()
    return [*found, digest(weight.grad for weight in weights)]


def peak(model: nn.Module, compiled: Any, variant: str) -> int:
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step("once", model, compiled, variant)
        return torch.cuda.max_memory_allocated()
    model.zero_grad(set_to_none=True)  # the profiler does not count what was there before, nor that it goes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step("once", model, compiled, variant)
    found = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    return max(itertools.accumulate(each.nbytes() for each in sorted(found, key=lambda event: event.start_ns())))


def main() -> None:
    wanted = json.loads(sys.argv[1])
    torch._functorch.config.enable_autograd_cache = wanted.get("cached", True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for variant in wanted.get("variants", VARIANTS):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model().to(DEVICE)
        module = model
        if variant == "ddp":
            dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 10
            module = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1 / 8)
        compiled = torch.compile(module)
        for name in wanted["steps"]:
            found = peak(model, compiled, variant) if name == "measured" else step(name, model, compiled, variant)
            sys.stdout.write(json.dumps([variant, name, found]) + "\n")
        del module, compiled
    torch._dynamo.reset()
    gc.collect()  # DDP's reducer may wait for ever for a gloo group that is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
