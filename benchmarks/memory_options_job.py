"""The job that memory_options.py measures: two ranks, a model of a given size, an option on or off.

Not meant to be started by hand.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

WIDTH = 1024
STEPS = 12


def train(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=options.store, rank=rank, world_size=2)
    torch.manual_seed(rank)
    layers = round(options.megabytes * 1e6 / (4 * WIDTH * WIDTH))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=options.option == "views")
    if options.option == "zero":
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)
    else:
        optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=options.option != "keep")
        ddp(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--option", choices=("none", "views", "keep", "zero"), default="none")
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--store", required=True)
    options = parser.parse_args()
    import torch._dynamo  # noqa: F401  (once here instead of once in every rank)

    multiprocessing.start_processes(train, args=(options,), nprocs=2, start_method="fork")


if __name__ == "__main__":
    main()
