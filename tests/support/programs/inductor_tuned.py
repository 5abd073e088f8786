"""``inductor_tuned.py JSON``: a model under torch.compile on a GPU, whose kernels Inductor tunes. The argument is its settings.

Prints a line of JSON: the loss, and how often torch generated code and measured a kernel.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch
from torch import nn
from torch._inductor import compile_fx, config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

counts = {"codegens": 0, "measurements": 0}


def count(owner: Any, name: str, what: str) -> None:
    native = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        counts[what] += 1
        return native(*arguments, **keywords)

    setattr(owner, name, call)


count(compile_fx, "fx_codegen_and_compile", "codegens")
count(CachingAutotuner, "bench", "measurements")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(96, 80), nn.GELU(), nn.LayerNorm(80), nn.Linear(80, 96)).cuda()
with config.patch(**json.loads(sys.argv[1])):
    compiled = torch.compile(model)
    for _ in range(2):
        loss = compiled(torch.linspace(-1, 1, 2048 * 96, device="cuda").view(2048, 96)).square().mean()
        loss.backward()
for thread in threading.enumerate():
    if thread.name == "kcoord-choices":  # it would end with the process
        thread.join()
print(json.dumps({"loss": loss.item().hex(), **counts}))
