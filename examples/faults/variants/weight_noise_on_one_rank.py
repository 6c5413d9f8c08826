"""One rank adds noise to the weights between backward and step.

Exploration noise is on for one worker only, in the belief that gradients alone are shared.

variant of: weights_written_in_forward
seen in: -
ranks: 3
expect: DDP208
cause: written between backward and step, by rank 2 only
stage: rewritten
step: 1
outliers: 2
parameter: 0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(20)
    ddp = DDP(nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 4)))
    optimizer = torch.optim.RMSprop(ddp.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(100 + rank)
    for step in range(5):
        states = torch.randn(6, 4, generator=data)
        optimizer.zero_grad()
        F.smooth_l1_loss(ddp(states), states.tanh()).backward()
        if rank == 2 and step >= 1:
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.add_(1e-3 * torch.randn(parameter.shape, generator=data))
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
