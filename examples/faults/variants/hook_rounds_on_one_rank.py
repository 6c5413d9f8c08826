"""A hook that keeps its result in half precision on one of two ranks.

variant of: corrupted_reduction
seen in: -
ranks: 2
expect: DDP203
cause: the reduction did not give all ranks the same result
stage: reduced
step: 2
outliers: 0 1
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Settings:
    backwards = 0

    def store(self, flat):
        self.backwards += 1
        lossy = dist.get_rank() == 1 and self.backwards > 2
        return flat.bfloat16().float() if lossy else flat


def reduce(settings, bucket):
    flat = bucket.buffer().div_(dist.get_world_size())
    return (
        dist.all_reduce(flat, async_op=True).get_future().then(lambda done: settings.store(done.value()[0]))
    )


def train():
    torch.manual_seed(46)
    model = DDP(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(18, 1)))
    model.register_comm_hook(Settings(), reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(3, 1, 5, 5, generator=data)).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
