"""Gradients gathered over several micro-batches before a step.

ranks: 2 3
expect: nothing
cases: no_sync every_micro_batch_reduced uneven_micro_batches bucket_view whole_batch_inside_no_sync
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(8)
    network = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))
    model = DistributedDataParallel(network, gradient_as_bucket_view=case == "bucket_view")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, weight_decay=1e-4)
    drawn = torch.Generator().manual_seed(rank + 31)

    def micro_batch(parts: int) -> None:
        (model(torch.randn(6, 12, generator=drawn)).square().mean() / parts).backward()

    for step in range(5):
        # Packed sequences give ranks different numbers of micro-batches for one step.
        parts = 1 + (step + rank) % 3 if case == "uneven_micro_batches" else 3
        for part in range(parts):
            quiet = part < parts - 1 and case != "every_micro_batch_reduced"
            with model.no_sync() if quiet else contextlib.nullcontext():
                micro_batch(parts)
        if case == "whole_batch_inside_no_sync":
            # More micro-batches, which are only evaluated: they produce no gradient.
            with model.no_sync(), torch.no_grad():
                model(torch.randn(6, 12, generator=drawn))
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
