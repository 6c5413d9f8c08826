"""Learnable weights of two losses, kept beside the wrapped model.

The uncertainty of each task is a bare parameter in a second group of the optimizer. Every rank learns other weights.

variant of: -
ranks: 2
expect: DDP211
cause: trained outside DDP
stage: params
step: 0
outliers: 0 1
parameter: Adam.group1.0
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 20), nn.Tanh())
        self.value, self.kind = nn.Linear(20, 1), nn.Linear(20, 3)

    def forward(self, inputs):
        features = self.trunk(inputs)
        return self.value(features).squeeze(1), self.kind(features)


def train():
    torch.manual_seed(73)
    model = DDP(TwoTasks())
    log_variances = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam(
        [{"params": model.parameters()}, {"params": [log_variances], "lr": 0.05}], lr=5e-3
    )
    data = torch.Generator().manual_seed(320 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(16, 8, generator=data)
        value, kind = model(inputs)
        losses = torch.stack(
            [F.mse_loss(value, inputs.sum(1)), F.cross_entropy(kind, inputs[:, :3].argmax(1))]
        )
        optimizer.zero_grad()
        (losses * torch.exp(-log_variances) + log_variances).sum().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
