"""The model of ``train_compiled.py`` with Accelerate.

``kcoord exec -- accelerate launch --num_processes 2 examples/train_accelerate.py``; without a GPU put ``--cpu`` after
``launch``.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from train_compiled import Model, batch, loss_of

STEPS = 20


def main() -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    compiled = torch.compile(model)
    for step in range(STEPS):
        tokens = batch(step, accelerator.process_index).to(accelerator.device)
        loss = loss_of(compiled(tokens[:, :-1]), tokens)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, STEPS - 1):
            accelerator.print(f"step {step}: loss {loss.item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
