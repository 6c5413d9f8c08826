"""One rank's mask leaves nothing of its loss: its gradients are zero at every step, and DDP still divides by three.

The mask was built for longer texts, and the texts of this rank are all shorter than its offset.

variant of: few_questions_on_one_rank
seen in: -
ranks: 3
expect: DDP218
cause: does not depend on the parameters
step: none
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(82)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(12):
        inputs = torch.randn(16, 8, generator=drawn)
        lengths = torch.randint(2, 6, (16,), generator=drawn) + (0 if rank == 2 else 8)
        mask = (lengths > 8).float()
        losses = F.cross_entropy(model(inputs), inputs[:, :4].argmax(1), reduction="none")
        optimizer.zero_grad()
        ((losses * mask).sum() / mask.sum().clamp(min=1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
