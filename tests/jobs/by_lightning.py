"""Lightning's `ddp` strategy, which starts this script once more for every further rank."""

from __future__ import annotations

import os
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

STEPS = 3


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(42)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(torch.randn(64, 8), batch_size=4))
    print(f"rank {trainer.global_rank} took {trainer.global_step} steps in {os.getpid()}", flush=True)


if __name__ == "__main__":
    main()
