"""A communication hook that divides, and asks the AllReduce for an average as well.

From the second epoch on a hook with gradient predivision takes over; the division is done before and after.
Training slows down by the number of ranks, which looks like a learning rate that is too small.

bug: 37
seen in: twinkle#290
ranks: 2
expect: DDP204
cause: divided twice
stage: reduced
step: 3
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SWITCH = 3


class Predivide:
    """Divides before the sum, against overflow in half precision; from some step on also behind it."""

    def __init__(self):
        self.backwards = 0

    def scale(self, flat):
        return flat / dist.get_world_size() if self.backwards > SWITCH else flat


def reduce(state, bucket):
    state.backwards += bucket.is_last()
    flat = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda done: state.scale(done.value()[0]))


def train():
    torch.manual_seed(22)
    model = DDP(nn.Sequential(nn.Unflatten(1, (2, 10)), nn.Conv1d(2, 4, 3), nn.Flatten(), nn.Linear(32, 1)))
    model.register_comm_hook(Predivide(), reduce)
    optimizer = torch.optim.Rprop(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(4, 20, generator=data)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
