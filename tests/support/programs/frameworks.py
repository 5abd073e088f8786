"""A rank that trains as people do, under torch.compile on a GPU, one way after the other. Run it with torchrun.

Its arguments are names of `WAYS`. For each one it prints the losses to the bit, and how often torch traced and generated code.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch._functorch.aot_autograd as aot_autograd
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import compile_fx
from torch.utils.checkpoint import checkpoint

WIDTH, BATCH, STEPS = 64, 16, 3
counts = {"traces": 0, "codegens": 0}


class Block(nn.Module):
    def __init__(self, width: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.mlp, x, use_reentrant=False) if self.checkpointed else self.mlp(x)
        return x + hidden

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.1))


def stack(width: int, **kwargs: Any) -> nn.Module:
    """No two ways have a graph in common."""
    return nn.Sequential(*(Block(width + 16 * number, **kwargs) for number in range(2))).cuda()


def batch(step: int) -> Tensor:
    return torch.linspace(-1, 1, BATCH * WIDTH, device="cuda").reshape(BATCH, WIDTH) * (step + 1)


def trained(model: nn.Module, compiled: Any, backward_each: int = 1) -> Iterator[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)  # mixes DTensors and others
    for step in range(STEPS):
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(batch(step)).float().square().mean()
        loss.backward()
        yield loss
        if step % backward_each == backward_each - 1:
            optimizer.step()
            optimizer.zero_grad()


def cuda_graphs() -> Iterator[Tensor]:
    model = nn.parallel.DistributedDataParallel(stack(64))
    return trained(model, torch.compile(model, mode="reduce-overhead"))


def checkpointed() -> Iterator[Tensor]:
    model = nn.parallel.DistributedDataParallel(stack(128, checkpointed=True))
    return trained(model, torch.compile(model))


def accumulated() -> Iterator[Tensor]:
    """Gradients of two steps together; DDP's buckets are small, so that its optimizer splits the graph."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 12
    model = nn.parallel.DistributedDataParallel(stack(192), bucket_cap_mb=0.03)
    return trained(model, torch.compile(model), backward_each=2)


def fsdp() -> Iterator[Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = stack(256)
    for block in model:
        fully_shard(block)
    return trained(fully_shard(model), torch.compile(model))


def tensor_parallel() -> Iterator[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = stack(320), init_device_mesh("cuda", (dist.get_world_size(),))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return trained(model, torch.compile(model))


def hf_trainer() -> Iterator[Tensor]:
    import tempfile

    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4
    )
    tokens = torch.arange(32) % 128
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory, max_steps=STEPS, per_device_train_batch_size=4, torch_compile=True, bf16=True,
            report_to=[], save_strategy="no", logging_strategy="steps", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        data = [{"input_ids": tokens, "labels": tokens}] * 64
        trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data)
        trainer.train()
    yield from (torch.tensor(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry)


def lightning() -> Iterator[Tensor]:
    import lightning

    losses: list[Tensor] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.compile(stack(384))

        def training_step(self, inputs: Tensor, number: int) -> Tensor:
            loss = self.model(inputs).float().square().mean()
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        accelerator="gpu", devices=torch.cuda.device_count(), strategy="ddp", max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, precision="bf16-mixed",
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.linspace(-1, 1, 64 * WIDTH).reshape(64, WIDTH), batch_size=4)
    trainer.fit(Module(), data)
    yield from losses


WAYS = {
    each.__name__: each
    for each in (cuda_graphs, checkpointed, accumulated, fsdp, tensor_parallel, hf_trainer, lightning)
}


def counted(owner: Any, name: str, what: str) -> None:
    native = getattr(owner, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        counts[what] += 1
        return native(*arguments, **keywords)

    setattr(owner, name, call)


def main() -> None:
    counted(compile_fx, "fx_codegen_and_compile", "codegens")
    counted(aot_autograd, "aot_stage1_graph_capture", "traces")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    for way in sys.argv[1:]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        counts.update(traces=0, codegens=0)
        losses = [loss.item().hex() for loss in WAYS[way]()]
        sys.stdout.write(json.dumps({"way": way, "losses": losses, **counts}) + "\n")
        sys.stdout.flush()
        gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
