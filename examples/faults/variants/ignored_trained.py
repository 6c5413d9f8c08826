"""A layer that DDP is configured to ignore is trained, and no one reduces its gradients.

It was equal on all ranks after wrapping. Nothing shows whether each rank is meant to have its own, so this is a note.

variant of: ignored_adapter
seen in: OneTrainer#803
ranks: 2
expect: DDP211
severity: note
cause: configured to ignore
stage: applied
step: 1
outliers: 0 1
parameter: own.bias
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.own = nn.Linear(16, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.own(self.body(inputs))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    network = Adapted()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, ["own.weight", "own.bias"])
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(40 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
