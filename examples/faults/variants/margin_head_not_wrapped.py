"""A margin head beside the wrapped embedding network: the optimizer trains it, and nothing reduces its gradients.

One optimizer steps the parameters of both. The embedding stays equal on all ranks, while each rank's head follows the
classes of its own batches, and the shared loss is measured against a different head on every rank.

variant of: -
ranks: 3
expect: DDP211
cause: trained outside DDP
stage: params
step: 0
outliers: 0 1 2
parameter: ArcMargin.weight
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class ArcMargin(nn.Module):
    def __init__(self, features, classes, scale=16.0, margin=0.3):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, features))
        nn.init.xavier_uniform_(self.weight)
        self.scale, self.cos, self.sin = scale, math.cos(margin), math.sin(margin)

    def forward(self, embeddings, labels):
        cosine = F.linear(F.normalize(embeddings), F.normalize(self.weight)).clamp(-0.999, 0.999)
        turned = cosine * self.cos - (1 - cosine.square()).sqrt() * self.sin
        chosen = F.one_hot(labels, cosine.shape[1]).bool()
        return self.scale * torch.where(chosen, turned, cosine)


def train():
    torch.manual_seed(71)
    backbone = DDP(nn.Sequential(nn.Linear(10, 24), nn.PReLU(), nn.Linear(24, 8)))
    head = ArcMargin(8, 5)
    optimizer = torch.optim.SGD(list(backbone.parameters()) + list(head.parameters()), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(300 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(16, 10, generator=data)
        labels = inputs[:, :5].argmax(1)
        optimizer.zero_grad()
        F.cross_entropy(head(backbone(inputs), labels), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
