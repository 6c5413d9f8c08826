"""Every step ends with a barrier before and after rank 0 prints the loss, in a helper of the program.

variant of: barrier_in_every_step
seen in: -
ranks: 2
expect: DDP409
severity: note
cause: barrier() is called in the training loop
stage: barrier
step: none
outliers: 0 1
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def log(step, loss):
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"step {step}: {loss:.4f}", file=sys.stderr)
    dist.barrier()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(15)
    model = DDP(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for step in range(40):
        inputs = torch.randn(256, 256, generator=drawn)
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(step, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
