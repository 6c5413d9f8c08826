"""The optimizer is created first; then the model is copied for the wrapper, and the copy is never stepped.

DDP reduces the gradients of the copy. The optimizer steps the original, which has no gradients. All replicas stay
equal: they keep their first values.

variant of: -
ranks: 2
expect: DDP606
also: DDP215
cause: the optimizers hold other tensors than the DDP modules
step: none
outliers: 0 1
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    torch.manual_seed(29)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model = DDP(copy.deepcopy(network))
    data = torch.Generator().manual_seed(70 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
