"""One rank receives another result of the AllReduce than the rest.

A bit is flipped in what rank 1 gets, as broken memory or a broken card would do. The hook only simulates
the hardware.

bug: 36
seen in: pytorch#84803
ranks: 3
expect: DDP203
cause: the reduction did not give all ranks the same result
stage: reduced
step: 3
outliers: 1
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BROKEN_RANK, BROKEN_CALL = 1, 3


class Network:
    """Communication hook that counts its calls."""

    def __init__(self):
        self.calls = 0

    def deliver(self, flat):
        if dist.get_rank() == BROKEN_RANK and self.calls == BROKEN_CALL:
            flat.view(torch.int32)[-1] ^= 1 << 20
        self.calls += 1
        return flat


def reduce(network, bucket):
    flat = bucket.buffer().div_(dist.get_world_size())
    future = dist.all_reduce(flat, async_op=True).get_future()
    return future.then(lambda done: network.deliver(done.value()[0]))


def train():
    torch.manual_seed(20)
    model = DDP(nn.Sequential(nn.Linear(6, 12), nn.Hardswish(), nn.Linear(12, 3)))
    model.register_comm_hook(Network(), reduce)
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(5, 6, generator=data)
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
