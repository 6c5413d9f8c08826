"""The encoder still runs under no_grad, left from the time when it was frozen: only the head learns.

The encoder requires gradients again and is in the optimizer. DDP looks for unused parameters, so it says nothing.

bug: 47
seen in: -
ranks: 2
expect: DDP215
cause: no gradient reaches
step: none
outliers: 0 1
parameter: encoder.0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 20), nn.GELU())
        self.head = nn.Linear(20, 3)

    def forward(self, inputs):
        with torch.no_grad():
            features = self.encoder(inputs)
        return self.head(features)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = DDP(Classifier(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(8):
        inputs = torch.randn(8, 10, generator=drawn)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :3].argmax(1)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
