"""FSDP1 with layers of their own: rank 0 leaves autocast from step 4 on, to look for a NaN.

variant of: autocast_on_one_rank
ranks: 2
also: DDP606
expect: DDP213
cause: autocast is on on rank 1 only
stage: forward
step: 4
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F


def train():
    torch.manual_seed(88)
    layers = [nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)]
    sharded = [FullyShardedDataParallel(layer, device_id=torch.device("cpu")) for layer in layers]
    model = FullyShardedDataParallel(nn.Sequential(*sharded, nn.LayerNorm(8)), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(184 + dist.get_rank())
    for step in range(8):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        enabled = step < 4 or dist.get_rank() == 1
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs = model(inputs)
        F.mse_loss(outputs.float(), inputs.sin()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
