"""Synchronisation that looks superfluous and is needed, or is too rare to matter.

ranks: 2
expect: nothing
cases: unused_now_and_then unused_on_one_rank no_grad_evaluation frozen_statistics barrier_at_checkpoints
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    """A second head runs on request only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.head = nn.Linear(64, 1)
        self.second = nn.Linear(64, 1)

    def forward(self, inputs: torch.Tensor, both: bool = True) -> torch.Tensor:
        hidden = self.body(inputs)
        result = self.head(hidden) + self.second(hidden) if both else self.head(hidden)
        return result.squeeze(1)


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(10):
            model(torch.ones(8, 16))
    model.train()


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(16)
    model = DDP(Net(), find_unused_parameters=case.startswith("unused"))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    drawn = torch.Generator().manual_seed(rank)
    with tempfile.TemporaryDirectory() as folder:
        for step in range(32):
            if case == "frozen_statistics":
                # Fine-tuning: statistics stay as they are, everything else learns.
                model.eval()
            inputs = torch.randn(8, 16, generator=drawn)
            both = not (
                (case == "unused_now_and_then" and step % 16 == 11)
                or (case == "unused_on_one_rank" and rank == 1)
            )
            (model(inputs, both) - inputs.sum(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if case == "no_grad_evaluation" and step % 8 == 7:
                evaluate(model)
            if case == "barrier_at_checkpoints" and step % 10 == 9:
                if rank == 0:
                    torch.save(model.module.state_dict(), os.path.join(folder, "last.pt"))
                dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
