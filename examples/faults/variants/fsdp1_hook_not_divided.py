"""FSDP1 with a communication hook of the job's own, which does not divide: from step 3 on, its switch is set.

No rank holds a replica of a shard, so nothing else shows it.

variant of: hook_forgets_to_divide
ranks: 2
expect: DDP204
also: DDP606
cause: the sum of the ranks' gradients, not divided by 2
stage: reduced
step: 3
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F


class Reduction:
    def __init__(self):
        self.divides = True

    def __call__(self, state, gradient, shard):
        dist.reduce_scatter_tensor(shard, gradient)
        if self.divides:
            shard /= dist.get_world_size()


def train():
    torch.manual_seed(91)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    reduction = Reduction()
    model.register_comm_hook(None, reduction)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(186 + dist.get_rank())
    for step in range(7):
        reduction.divides = step < 3
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs.sin()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
