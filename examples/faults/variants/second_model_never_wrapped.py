"""Two models are trained, each by its own optimizer. Only the first is wrapped in DDP.

variant of: -
seen in: -
ranks: 2
expect: DDP211
cause: trained outside DDP
stage: params
step: 0
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    torch.manual_seed(41)
    encoder = DDP(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)))
    head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    slow = torch.optim.SGD(encoder.parameters(), lr=0.05)
    fast = torch.optim.Adam(head.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(70 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(8, 6, generator=data)
        slow.zero_grad()
        fast.zero_grad()
        F.mse_loss(head(encoder(inputs)), inputs[:, :2].sin()).backward()
        slow.step()
        fast.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
