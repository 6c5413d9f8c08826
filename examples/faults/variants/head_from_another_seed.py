"""One of three ranks has used its generator before it builds the head, and builds another one than the rest.

variant of: -
seen in: -
ranks: 3
launcher: torchrun
expect: DDP102
severity: note
cause: DDP overwrote them all with rank 0's
stage: init.before
step: none
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 3, 3)
        if dist.get_rank() == 2:
            torch.rand(1)  # a look at the data, which the other ranks do not take
        self.head = nn.Linear(27, 4)

    def forward(self, images):
        return self.head(self.body(images).relu().flatten(1))


def train():
    torch.manual_seed(62)
    model = DDP(Classifier(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        images, labels = torch.randn(4, 1, 5, 5, generator=data), torch.randint(4, (4,), generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
