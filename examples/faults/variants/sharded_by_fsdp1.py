"""A model in FullyShardedDataParallel (FSDP1), with the original parameters in the optimizer.

variant of: -
seen in: -
ranks: 2
expect: DDP606
cause: FSDP
step: none
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F


def train():
    torch.manual_seed(53)
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = FullyShardedDataParallel(network, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(4):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs[:, :4].sin()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
