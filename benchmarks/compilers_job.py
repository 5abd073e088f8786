"""One rank that has its extension built, cold or warm. Run it with torchrun.

Rank 0 prints one line of JSON: wall seconds from barrier to barrier, and the builds of all ranks together.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

SOURCE = "torch::Tensor twice(torch::Tensor x) { return x * 2; }"
builds = 0


def main() -> None:
    dist.init_process_group("gloo")
    native = cpp_extension._run_ninja_build

    def counted(*arguments: Any, **keywords: Any) -> Any:
        global builds
        builds += 1
        return native(*arguments, **keywords)

    cpp_extension._run_ninja_build = counted
    dist.barrier()
    begun = time.perf_counter()
    module = cpp_extension.load_inline("twice", cpp_sources=[SOURCE], functions=["twice"])
    assert torch.equal(module.twice(torch.ones(2)), torch.full((2,), 2.0))
    dist.barrier()
    wall = time.perf_counter() - begun
    total = torch.tensor([builds])
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(json.dumps({"wall": wall, "builds": int(total)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
