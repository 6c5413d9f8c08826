"""Lower, higher and mixed precision.

ranks: 2 3
expect: nothing
cases: bf16_autocast scaler scaler_overflow scaler_with_clipping mixed_dtypes whole_in_bf16 double
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class MixedDtypes(nn.Module):
    """Statistics in double, the body in single, the last layer in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(9, dtype=torch.float64))
        self.body = nn.Sequential(nn.Linear(9, 14), nn.Tanh())
        self.head = nn.Linear(14, 3, dtype=torch.bfloat16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body((inputs.double() * self.scale).float()).bfloat16()).float()


def build(case: str) -> nn.Module:
    if case == "mixed_dtypes":
        return MixedDtypes()
    network = nn.Sequential(nn.Linear(9, 14), nn.ReLU(), nn.LayerNorm(14), nn.Linear(14, 3))
    return network.to({"whole_in_bf16": torch.bfloat16, "double": torch.float64}.get(case, torch.float32))


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(17)
    model = DistributedDataParallel(build(case))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", enabled="scaler" in case, init_scale=256.0, growth_interval=3)
    dtype = torch.float32 if case == "mixed_dtypes" else next(model.parameters()).dtype
    drawn = torch.Generator().manual_seed(rank)
    for step in range(8):
        inputs = torch.randn(7, 9, generator=drawn).to(dtype)
        autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        with autocast if case == "bf16_autocast" or "scaler" in case else contextlib.nullcontext():
            loss = model(inputs).float().square().mean()
        if case == "scaler_overflow" and step == 4 and rank == dist.get_world_size() - 1:
            # The reduction carries it to everybody, so that every rank skips this step.
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if case == "scaler_with_clipping":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
