"""A barrier after every step, "so that no rank runs ahead".

The result is right. DDP's AllReduce already keeps the ranks together, and each barrier costs a round of messages.

bug: 58
seen in: -
ranks: 2
expect: DDP409
severity: note
cause: barrier() is called in the training loop
stage: barrier
step: none
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(13)
    model = DDP(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(40):
        inputs = torch.randn(256, 256, generator=drawn)
        (model(inputs) - inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
