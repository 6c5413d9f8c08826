"""A training loop with accelerate."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

STEPS = 3


def main() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(42)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(torch.randn(STEPS * accelerator.num_processes * 4, 8), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for batch in data:
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
    accelerator.print(f"{accelerator.num_processes} processes, {type(model).__name__}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
