"""FSDP1 without sharding (NO_SHARD): from step 3 on, the last micro-batch runs inside `no_sync()` too.

With sharding, torch raises at the step: the gradients are whole and the parameters are not. Here nothing is divided,
and each rank applies its own gradients.

variant of: no_sync_never_left
ranks: 2
expect: DDP202
cause: no_sync open
stage: applied
step: 3
outliers: 0 1
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn import functional as F


def train():
    torch.manual_seed(93)
    layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    options = {"device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy.NO_SHARD}
    model = FullyShardedDataParallel(layers, use_orig_params=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(188 + dist.get_rank())
    for step in range(7):
        optimizer.zero_grad()
        for number in range(2):
            inputs = torch.randn(8, 8, generator=data)
            accumulates = number == 0 or step >= 3
            with model.no_sync() if accumulates else contextlib.nullcontext():
                (F.mse_loss(model(inputs), inputs.sin()) / 2).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
