"""Gradients averaged by hand, without DDP: the list of parameters to reduce lacks one.

The list was taken from the trunk and the classifier. The learned temperature is stepped on every rank by its own
gradient.

variant of: -
ranks: 3
expect: DDP211
cause: its gradients are not reduced, those of other parameters are
stage: params
step: 0
outliers: 0 1 2
parameter: Classifier.temperature
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 24), nn.ReLU())
        self.classifier = nn.Linear(24, 4)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, inputs):
        return self.classifier(self.trunk(inputs)) * self.temperature


def average_gradients(parameters):
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train():
    torch.manual_seed(76)
    model = Classifier()
    reduced = [*model.trunk.parameters(), *model.classifier.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(350 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(16, 10, generator=data)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        average_gradients(reduced)
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
