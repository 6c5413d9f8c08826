"""A communication hook that sums and does not divide.

With a hook of your own, DDP leaves the division to it. All ranks agree, on a gradient that is as many times
too long as there are ranks: the learning rate that works on one machine explodes on eight.

bug: 37
seen in: twinkle#290
ranks: 3
expect: DDP204
cause: the sum of the ranks' gradients, not divided by 3
stage: reduced
step: 0
outliers: 0 1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def summing(group, bucket):
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def train():
    torch.manual_seed(21)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.Mish(), nn.Linear(16, 4)))
    model.register_comm_hook(None, summing)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        inputs, classes = torch.randn(6, 8, generator=data), torch.randint(4, (6,), generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), classes).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
