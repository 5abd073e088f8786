"""A rank that builds an extension with a CUDA kernel, and uses it. Run it with torchrun."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

CUDA = """
#include <c10/cuda/CUDAStream.h>
__global__ void twice(float *x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2;
}
void doubled(torch::Tensor x) {
  twice<<<(x.numel() + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(x.data_ptr<float>(), x.numel());
}
"""
builds = 0


def main() -> None:
    global builds
    dist.init_process_group("gloo")
    native = cpp_extension._run_ninja_build

    def counted(*arguments: Any, **keywords: Any) -> Any:
        global builds
        builds += 1
        return native(*arguments, **keywords)

    cpp_extension._run_ninja_build = counted
    declared = "void doubled(torch::Tensor x);"
    module = cpp_extension.load_inline("doubling", cpp_sources=[declared], cuda_sources=[CUDA], functions=["doubled"])
    x = torch.arange(1000.0, device="cuda")
    module.doubled(x)
    right = torch.equal(x.cpu(), 2 * torch.arange(1000.0))
    sys.stdout.write(json.dumps({"right": right, "builds": builds}) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
