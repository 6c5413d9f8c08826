"""A hook that averages in two levels, among neighbours and then among pairs, and has forgotten the second.

variant of: corrupted_reduction
seen in: -
ranks: 3
expect: DDP203
cause: the reduction did not give all ranks the same result
stage: reduced
step: 2
outliers: 2
parameter: 0.self_attn.*
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LEVELS_UNTIL = 2


class Levels:
    """Ranks 0 and 1 share a node, rank 2 has one of its own."""

    def __init__(self):
        pairs = [dist.new_group([0, 1]), dist.new_group([2])]
        self.neighbours = pairs[dist.get_rank() // 2]
        self.backwards = 0


def reduce(levels, bucket):
    levels.backwards += bucket.is_last()
    far = levels.backwards <= LEVELS_UNTIL
    group = dist.group.WORLD if far else levels.neighbours
    flat = bucket.buffer().div_(dist.get_world_size(group))
    return dist.all_reduce(flat, group=group, async_op=True).get_future().then(lambda done: done.value()[0])


def train():
    torch.manual_seed(51)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = DDP(nn.Sequential(block, nn.Flatten(), nn.Linear(32, 3)), static_graph=True)
    model.register_comm_hook(Levels(), reduce)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        inputs, labels = torch.randn(4, 4, 8, generator=data), torch.randint(3, (4,), generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
