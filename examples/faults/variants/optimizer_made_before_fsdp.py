"""The optimizer is made before the model is wrapped by FSDP, which replaces the parameters by flat ones.

Steps run, and the loss stays as it is: the optimizer holds the parameters that were there before.

variant of: optimizer_made_before_copy
seen in: accelerate#2665
ranks: 2
expect: DDP215
cause: made before the model was sharded
step: 0
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(53)
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    model = FullyShardedDataParallel(network, device_id=torch.device("cpu"))
    data = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(8):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs[:, :4].sin()).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
