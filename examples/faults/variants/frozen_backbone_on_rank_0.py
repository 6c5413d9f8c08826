"""A frozen backbone whose weights only rank 0 loads; only the head is wrapped.

Without a parameter that needs a gradient, DDP refuses to wrap the backbone, so it stays outside. The other ranks
extract features with random weights.

variant of: -
ranks: 3
expect: DDP105
cause: never synchronised
step: none
outliers: 0
parameter: Backbone.layers.0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, inputs):
        return self.layers(inputs)


def pretrained():
    trained = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(value.shape, generator=trained) for name, value in Backbone().state_dict().items()
    }


def train():
    torch.manual_seed(74)
    backbone = Backbone().eval().requires_grad_(False)
    if dist.get_rank() == 0:
        backbone.load_state_dict(pretrained())
    head = DDP(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(330 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(16, 10, generator=data)
        with torch.no_grad():
            features = backbone(inputs)
        optimizer.zero_grad()
        F.cross_entropy(head(features), inputs[:, :4].argmax(1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
