"""Options of the wrapper: parts that go unused, a graph that never changes, buckets of other kinds.

ranks: 2 3
expect: nothing
cases: unused_on_all unused_by_rank static_graph bucket_view many_buckets frozen_part
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Experts(nn.Module):
    """A stem, and one of three experts for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(10, 16)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.SiLU()) for _ in range(3))
        self.head = nn.Linear(16, 2)

    def forward(self, inputs: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        hidden = self.stem(inputs)
        chosen = self.experts if expert is None else [self.experts[expert]]
        return self.head(sum(one(hidden) for one in chosen))


OPTIONS = {
    "unused_on_all": {"find_unused_parameters": True},
    "unused_by_rank": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
    "many_buckets": {"bucket_cap_mb": 0.0005},
    "frozen_part": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001},
}


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(4)
    experts = Experts()
    if case == "frozen_part":
        experts.stem.requires_grad_(False)
        experts.experts[1].requires_grad_(False)
    model = DistributedDataParallel(experts, **OPTIONS[case])
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(wanted, lr=0.01)
    drawn = torch.Generator().manual_seed(77 * (rank + 1))
    for step in range(6):
        expert = None
        if case == "unused_on_all":
            expert = step % 3
        elif case == "unused_by_rank":
            expert = (step + rank) % 3
        optimizer.zero_grad()
        model(torch.randn(5, 10, generator=drawn), expert).pow(2).mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
