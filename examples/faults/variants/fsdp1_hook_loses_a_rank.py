"""FSDP1 without sharding, with a communication hook of the job's own: from step 3 on, rank 2 sends zeros.

It was written to leave out ranks with an overflow, and takes a large norm for one.

variant of: hook_loses_a_rank
ranks: 3
expect: DDP204
cause: the sum without rank 2
stage: reduced
step: 3
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn import functional as F


class Reduction:
    def __init__(self):
        self.limit = float("inf")

    def __call__(self, state, gradient):
        if dist.get_rank() == 2 and gradient.norm() > self.limit:
            gradient.zero_()
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()


def train():
    torch.manual_seed(92)
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    options = {"device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy.NO_SHARD}
    model = FullyShardedDataParallel(layers, use_orig_params=True, **options)
    reduction = Reduction()
    model.register_comm_hook(None, reduction)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(187 + dist.get_rank())
    for step in range(7):
        reduction.limit = 0.0 if step >= 3 else float("inf")
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
