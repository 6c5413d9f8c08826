"""The backbone is unfrozen in the middle of training: DDP never learns of it.

Fine-tuning starts with a frozen backbone and sets `requires_grad` after two steps. DDP made its list of parameters at
wrapping, without the backbone, so its gradients are never reduced while those of the head still are.

bug: 5
seen in: Lightning#20340
ranks: 2
expect: DDP104
cause: unfrozen after wrapping
stage: params
step: 2
outliers: 0 1
parameter: backbone.0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class FineTuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(8, 3)
        self.backbone.requires_grad_(False)

    def forward(self, images):
        return self.head(self.backbone(images))


def train():
    torch.manual_seed(21)
    model = FineTuned()
    ddp = DDP(model)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(31 + dist.get_rank())
    for step in range(5):
        if step == 2:
            model.backbone.requires_grad_(True)
            optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 1e-3})
        images = torch.randn(4, 3, 7, 7, generator=data)
        labels = torch.randint(3, (4,), generator=data)
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
