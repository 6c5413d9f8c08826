"""A communication hook sums gradients in float16: each rank's own is finite, their sum is not.

variant of: nan_spreads
seen in: -
ranks: 3
expect: DDP209
cause: the reduction itself produced
stage: reduced
step: 3
outliers: 0 1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def in_half(group, bucket):
    half = bucket.buffer().to(torch.float16)

    def divided(future):
        return future.value()[0].to(torch.float32) / dist.get_world_size()

    return dist.all_reduce(half, async_op=True).get_future().then(divided)


def train():
    rank = dist.get_rank()
    torch.manual_seed(95)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    model.register_comm_hook(None, in_half)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    drawn = torch.Generator().manual_seed(rank)
    for step in range(6):
        inputs = torch.randn(8, 8, generator=drawn)
        optimizer.zero_grad()
        # A loss that was scaled up for half precision.
        (model(inputs).mean() * (30000.0 if step == 3 else 1.0)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
