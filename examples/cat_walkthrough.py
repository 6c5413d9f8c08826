"""Four ranks train a cat detector of three weights for one step. You can check every number by hand.

    ddpcheck run --save-gradients 0 -- torchrun --nproc-per-node 4 examples/cat_walkthrough.py
    ddpcheck report --gradients 0

Every rank computes its own gradient of the weights for ear, whiskers and eyes. DDP averages the four gradients, and
all ranks take the same step. `--alone` bypasses DDP: the four ranks end with four different models.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WEIGHTS = {"ear": 0.5, "whiskers": 0.3, "eyes": 0.2}
# What each rank alone would add to ear, whiskers and eyes.
STEPS = [[0.1, 0.2, 0.3], [0.2, 0.1, 0.4], [0.3, 0.3, 0.2], [0.2, 0.2, 0.3]]


class CatDetector(nn.Module):
    """The score of a picture is the weighted sum of its three features."""

    def __init__(self) -> None:
        super().__init__()
        self.cat = nn.Parameter(torch.tensor(list(WEIGHTS.values()), dtype=torch.float64))

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return self.cat @ picture


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alone", action="store_true", help="bypass DDP: no gradient is averaged")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = CatDetector()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    picture = torch.tensor(STEPS[rank % len(STEPS)], dtype=torch.float64)
    # The gradient of this loss is minus the picture. SGD subtracts it, so it adds the picture to the weights.
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
