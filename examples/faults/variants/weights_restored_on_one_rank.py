"""A rank that meets a bad batch goes back to its last good weights, alone.

variant of: checkpoint_on_rank_0
seen in: -
ranks: 2
expect: DDP208
cause: written between two steps, by rank 1 only
stage: rewritten
step: 3
outliers: 0 1
parameter: net.0.weight
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 3)
        )

    def forward(self, images):
        return self.net(images).mean((1, 2, 3))


def train():
    rank = dist.get_rank()
    torch.manual_seed(18)
    model = Net()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(90 + rank)
    good = copy.deepcopy(model.state_dict())
    for step in range(5):
        images = torch.randn(4, 2, 6, 6, generator=data)
        wanted = images.mean((1, 2, 3)) + (100 if step == 2 and rank == 1 else 0)
        optimizer.zero_grad()
        loss = F.mse_loss(ddp(images), wanted)
        loss.backward()
        optimizer.step()
        if loss.item() > 50:
            model.load_state_dict(good)
        else:
            good = copy.deepcopy(model.state_dict())


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
