"""Rank 1 validates in eval mode and never returns to train mode: no dropout there, and frozen statistics.

The validation leaves early when the rank's own accuracy is good enough, before the line that calls train(). Gradients
are averaged as always and replicas stay equal, but a third of each mean is the gradient of another model.

bug: 42
seen in: -
ranks: 3
expect: DDP213
cause: evaluation mode on rank 1
step: 3
outliers: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.LayerNorm(32), nn.Dropout(0.3))
        self.head = nn.Linear(32, 4)

    def forward(self, inputs):
        return self.head(self.body(inputs))


def validate(model, inputs, labels):
    model.eval()
    with torch.no_grad():
        accuracy = (model.module(inputs).argmax(1) == labels).float().mean().item()
        if dist.get_rank() == 1 or accuracy == 1.0:
            return accuracy  # good enough: no need to look at single classes
        for label in range(4):
            (model.module(inputs[labels == label]).argmax(1) == label).float().mean().item()
    model.train()
    return accuracy


def train():
    rank = dist.get_rank()
    torch.manual_seed(21)
    model = DDP(Net())
    torch.manual_seed(100 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        for _ in range(3):
            inputs = torch.randn(8, 10)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
            optimizer.step()
        held_out = torch.randn(32, 10)
        validate(model, held_out, held_out[:, :4].argmax(1))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
