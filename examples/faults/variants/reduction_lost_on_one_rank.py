"""A transfer between two cards loses its data: the result of one AllReduce is zero on one rank.

The hook only simulates the hardware: direct transfers between some consumer cards delivered zeros.

variant of: corrupted_reduction
seen in: pytorch#84803, pytorch#96600
ranks: 2
expect: DDP203
cause: the reduction did not give all ranks the same result
stage: reduced
step: 4
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Cards:
    """Communication hook that counts its calls."""

    def __init__(self):
        self.calls = 0

    def reduce(self, state, bucket):
        self.calls += 1
        lost = dist.get_rank() == 1 and self.calls == 5
        future = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
        return future.then(lambda done: done.value()[0].mul_(0.0 if lost else 1.0))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(17)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)))
    model.register_comm_hook(None, Cards().reduce)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(8):
        inputs = torch.randn(8, 8, generator=drawn)
        optimizer.zero_grad()
        (model(inputs) - inputs[:, :2]).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
