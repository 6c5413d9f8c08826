"""The model goes to another dtype and back after wrapping: DDP's hooks stay behind.

An evaluation in bfloat16 converts the wrapped model and converts it back. Autograd makes new gradient accumulators for
the new memory, and DDP's hooks sit on the old ones. Moving a model from the GPU and back does the same.

bug: 2
seen in: pytorch#104336
ranks: 2
expect: DDP202
cause: hooks are lost
stage: applied
step: 3
outliers: 0 1
parameter: features.0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class SmallConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.classify = nn.Linear(32, 4)

    def forward(self, images):
        return self.classify(self.features(images).flatten(1))


@torch.no_grad()
def evaluate(model, images):
    model.to(torch.bfloat16)
    score = model(images.to(torch.bfloat16)).float().mean()
    model.to(torch.float32)
    return score


def train():
    torch.manual_seed(11)
    model = SmallConv()
    ddp = DDP(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    data = torch.Generator().manual_seed(20 + dist.get_rank())
    for step in range(6):
        if step == 3:
            evaluate(model, torch.ones(2, 1, 8, 8))
        images = torch.randn(6, 1, 8, 8, generator=data)
        labels = torch.randint(4, (6,), generator=data)
        optimizer.zero_grad()
        F.cross_entropy(ddp(images), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
