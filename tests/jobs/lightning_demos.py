"""Lightning's own demo models under its `ddp` strategy: `lightning_demos.py BoringModel`.

The strategy starts this script again for every further rank. Each rank prints its process id to stderr.
"""

from __future__ import annotations

import os
import sys
import warnings

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos import boring_classes

EPOCHS = 2


def main(name: str) -> None:
    warnings.simplefilter("ignore")
    seed_everything(42)
    model = getattr(boring_classes, name)()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=EPOCHS,
        limit_train_batches=8,
        limit_val_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=boring_classes.BoringDataModule())
    weights = [round(float(weight.detach().double().sum()), 12) for weight in model.parameters()]
    print(f"rank {trainer.global_rank}: {trainer.global_step} steps, {weights}", flush=True)
    print(f"rank {trainer.global_rank} is process {os.getpid()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
