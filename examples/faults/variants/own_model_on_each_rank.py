"""Every rank trains a model of its own, as in an ensemble: no replicas, so the report must not say that they agree.

Only the accuracy is shared. Nothing shows whether the ranks were meant to train one model.

variant of: -
ranks: 3
expect: DDP606
cause: no trained module is wrapped in DDP
step: none
outliers: 0 1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def train():
    torch.manual_seed(900 + dist.get_rank())
    model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(6):
        inputs = torch.randn(8, 8)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
