"""One process with a model on each of two GPUs, compiled, and run while either GPU is the current one.

Prints the losses and the gradients' sums to the bit, eager ones beside, and how often torch traced and generated code.
"""

from __future__ import annotations

import json

import torch
import torch._functorch.aot_autograd as aot_autograd
from torch import Tensor, nn
from torch._inductor import compile_fx

import kcoord

counts = {"traces": 0, "codegens": 0}


def count(owner: object, name: str, what: str) -> None:
    native = getattr(owner, name)

    def call(*args: object, **kwargs: object) -> object:
        counts[what] += 1
        return native(*args, **kwargs)

    setattr(owner, name, call)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(128, device=x.device) + torch.tensor([1.0, 2.0] * 64, device=x.device)
        return self.down(nn.functional.gelu(self.up(x)) + places).square().mean()


def step(model: nn.Module, called: nn.Module, gpu: int) -> list[float]:
    model.zero_grad()
    loss = called(torch.linspace(-1, 1, 32 * 64, device=f"cuda:{gpu}").reshape(32, 64))
    loss.backward()
    gradients = [parameter.grad.sum() for parameter in model.parameters()]
    assert {each.device.index for each in (loss, *gradients)} == {gpu}
    return [float(each) for each in (loss, *gradients)]


def main() -> None:
    kcoord.install()
    count(compile_fx, "fx_codegen_and_compile", "codegens")
    count(aot_autograd, "aot_stage1_graph_capture", "traces")
    models, found, after = [], {}, {}
    for gpu in range(2):
        torch.cuda.set_device(gpu)
        torch.manual_seed(0)
        model = Model().cuda()
        models.append((model, torch.compile(model)))
        found[f"{gpu}, its own"] = step(*models[-1], gpu)
        after[gpu] = dict(counts)
    for gpu, (model, compiled) in enumerate(models):
        torch.cuda.set_device(1 - gpu)
        found[f"{gpu}, the other"] = step(model, compiled, gpu)
        found[f"{gpu}, eager"] = step(model, model, gpu)
    print(json.dumps({"found": found, "after": after}))


if __name__ == "__main__":
    main()
