"""The optimizer is made before `fully_shard`, which replaces the parameters by shards.

Steps run, and the loss stays as it is: the optimizer holds the parameters that were there before.

variant of: optimizer_made_before_copy
seen in: accelerate#2665
ranks: 2
expect: DDP215
cause: made before the model was sharded
step: 0
outliers: 0 1
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(53)
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    model = fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    data = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(8):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs[:, :4].sin()).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
