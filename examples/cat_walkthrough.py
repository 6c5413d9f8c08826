"""Four ranks teach a cat detector of three weights, with numbers that can be followed by hand.

    ddpcheck run --save-gradients 0 -- torchrun --nproc-per-node 4 examples/cat_walkthrough.py
    ddpcheck report --gradients 0

Every rank finds its own way to improve the weights for ear, whiskers and eyes. DDP averages the four ways, and
all ranks take the same step. `--alone` leaves DDP out of it: four ranks, four different cats.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WEIGHTS = {"ear": 0.5, "whiskers": 0.3, "eyes": 0.2}
# What each rank would add to ear, whiskers and eyes.
STEPS = [[0.1, 0.2, 0.3], [0.2, 0.1, 0.4], [0.3, 0.3, 0.2], [0.2, 0.2, 0.3]]


class CatDetector(nn.Module):
    """Three weights; the more a picture has of each part, the more it is a cat."""

    def __init__(self) -> None:
        super().__init__()
        self.cat = nn.Parameter(torch.tensor(list(WEIGHTS.values()), dtype=torch.float64))

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return self.cat @ picture


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alone", action="store_true", help="go around DDP: no gradient is averaged")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = CatDetector()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    picture = torch.tensor(STEPS[rank % len(STEPS)], dtype=torch.float64)
    # The gradient of this loss is minus the picture, and SGD steps against it: the picture is what gets added.
    loss = -(model if options.alone else ddp)(picture)
    loss.backward()
    optimizer.step()
    if rank == 0 or options.alone:
        print(
            f"rank {rank}: "
            + ", ".join(f"{n} {w:.2f}" for n, w in zip(WEIGHTS, model.cat.tolist(), strict=True))
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
