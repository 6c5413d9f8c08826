"""One rank takes its device for a small one and keeps the embedding in half precision: DDP refuses to wrap the model.

variant of: parameters_in_set_order
seen in: -
ranks: 3
exit: fails
expect: DDP103
also: DDP602
cause: another dtype
step: none
outliers: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(92)
    net = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8))
    if rank == 1:
        net[0].to(torch.bfloat16)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randint(20, (8,), generator=drawn)).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
