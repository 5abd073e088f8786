"""Train a small transformer with torch.compile: under DDP as a whole, or with ``--fsdp`` under FSDP2, block by block.

``kcoord-torchrun --standalone --nproc-per-node 2 examples/train_compiled.py [--fsdp]``, or the same with ``torchrun``: the script
knows nothing of kcoord.
"""

from __future__ import annotations

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

WORDS, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 32, 4, 2, 16, 8


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each after a norm and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Names the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int, rank: int) -> Tensor:
    """Texts in which each token is the one before it, plus one."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randint(WORDS, (BATCH, 1), generator=generator) + torch.arange(LENGTH + 1)) % WORDS


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def sharded(model: Model) -> nn.Module:
    """FSDP2, with each block compiled: equal blocks are compiled once."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        block.compile()
        fully_shard(block)
    return fully_shard(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    local, on_gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(args, device)
    torch._dynamo.reset()
    gc.collect()  # DDP's reducer may wait for ever for a gloo group that is destroyed
    dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    trained = sharded(model) if args.fsdp else torch.compile(nn.parallel.DistributedDataParallel(model))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for step in range(args.steps):
        tokens = batch(step, dist.get_rank()).to(device)
        loss = loss_of(trained(tokens[:, :-1]), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step in (0, args.steps - 1):
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
