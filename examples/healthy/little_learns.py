"""Parameters that rightly stay as they are: frozen, warmed up, unused, or trained by no optimizer.

ranks: 2
expect: nothing
cases: warm_up_from_zero frozen_encoder head_alone_in_optimizer overflow_in_every_step unused_heads adapters_from_zero
  two_phases gradients_measured
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """An encoder with an adapter beside it that begins at zero, and several heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12))
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 12, bias=False)
        nn.init.zeros_(self.up.weight)
        self.heads = nn.ModuleList(nn.Linear(12, 2) for _ in range(heads))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.heads[0](self.encoder(inputs) + self.up(self.down(inputs)))


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    network = Model(heads=3 if case == "unused_heads" else 1)
    if case in ("frozen_encoder", "adapters_from_zero"):
        network.encoder.requires_grad_(False)
    model = DistributedDataParallel(network, find_unused_parameters=case in ("unused_heads", "two_phases"))
    trained = network.heads if case == "head_alone_in_optimizer" else network
    optimizer = torch.optim.SGD((p for p in trained.parameters() if p.requires_grad), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: float(step >= 6) if case == "warm_up_from_zero" else 1.0
    )
    scaler = torch.amp.GradScaler("cpu", enabled=case == "overflow_in_every_step", init_scale=64.0)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for step in range(8):
        if case == "two_phases":
            network.encoder.requires_grad_(step >= 6)
        inputs = torch.randn(8, 6, generator=drawn)
        loss = (model(inputs) - inputs[:, :2]).square().mean()
        if case == "overflow_in_every_step" and step < 7:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if case != "gradients_measured":
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
