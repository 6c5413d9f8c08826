"""One rank clears its optimizer's momenta in mid-run; gradients and settings are the same everywhere.

variant of: optimizer_state_on_rank_0
seen in: -
ranks: 3
expect: DDP201
cause: all applied the same gradients
stage: params
step: 3
outliers: 1
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(80)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(900 + rank)
    for step in range(6):
        if step == 3 and rank == 1:
            optimizer.state.clear()
        inputs, labels = torch.randn(8, 6, generator=data), torch.randint(3, (8,), generator=data)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
