"""A rank that compiles what it does with a tensor of the whole mesh: taking its own part."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch._functorch.aot_autograd as aot_autograd
import torch.distributed as dist
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import kcoord

traces = 0


def main() -> None:
    kcoord.install()
    native = aot_autograd.aot_stage1_graph_capture

    def counted(*arguments: Any, **keywords: Any) -> Any:
        global traces
        traces += 1
        return native(*arguments, **keywords)

    aot_autograd.aot_stage1_graph_capture = counted
    config.fallback_by_default = True  # no C++ to build
    world = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", init_method=f"file://{os.environ['MEETING']}", **world)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.nn.Parameter(distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Replicate()]))

    def part(tensor: Any) -> Any:
        return (tensor * 2).redistribute(placements=[Shard(0)]).to_local()

    right = torch.equal(torch.compile(part)(whole), part(whole))
    sys.stdout.write(json.dumps({"right": right, "traces": traces}) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
