"""A hook that sends zeros for a rank which it takes for idle.

variant of: hook_forgets_to_divide
seen in: -
ranks: 3
expect: DDP204
cause: without rank 1, divided by 3
stage: reduced
step: 2
outliers: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Idle:
    """Believes that rank 1 has run out of data."""

    def __init__(self):
        self.backwards = 0


def reduce(idle, bucket):
    idle.backwards += bucket.is_last()
    flat = bucket.buffer().div_(dist.get_world_size())
    if dist.get_rank() == 1 and idle.backwards > 2:
        flat.zero_()
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda done: done.value()[0])


def train():
    torch.manual_seed(47)
    model = DDP(nn.Sequential(nn.Embedding(20, 5), nn.Flatten(), nn.Linear(15, 20)))
    model.register_comm_hook(Idle(), reduce)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        tokens = torch.randint(20, (8, 3), generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens[:, 0]).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
