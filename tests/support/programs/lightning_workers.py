"""Lets Lightning start ranks that compile kernels: lightning_workers.py STRATEGY REPORTS EXIT-CODE."""

from __future__ import annotations

import sys

import lightning
import torch

import worker


class Module(lightning.LightningModule):
    def __init__(self, reports: str) -> None:
        super().__init__()
        self.reports, self.layer = reports, torch.nn.Linear(1, 1)

    def training_step(self, inputs: torch.Tensor, number: int) -> torch.Tensor:
        if number == 0:
            worker.work(self.reports)
        return self.layer(inputs).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    strategy, reports, code = sys.argv[1:]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=worker.WORKERS, strategy=strategy, max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(reports), torch.utils.data.DataLoader(torch.ones(4, 1)))
    sys.exit(int(code))
