"""One rank of a job that compiles nothing: an MLP under DDP, in eager mode, on the CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

_STEPS, _WIDTH, _BATCH = 150, 512, 64


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(8))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(_STEPS):
        optimizer.zero_grad()
        model(torch.randn(_BATCH, _WIDTH)).square().mean().backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
