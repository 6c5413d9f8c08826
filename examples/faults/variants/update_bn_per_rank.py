"""torch's own `update_bn` after stochastic weight averaging, on each rank's own loader.

variant of: batch_norm_recomputed
seen in: -
ranks: 3
expect: DDP210
cause: written after the last training step
stage: buffers.end
step: none
outliers: 0 1 2
parameter: norm.running_mean
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import update_bn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.outer = nn.Linear(8, 1)

    def forward(self, inputs):
        return self.outer(torch.relu(self.norm(self.inner(inputs))))


def train():
    rank = dist.get_rank()
    torch.manual_seed(38)
    net = Net()
    model, optimizer = DDP(net), torch.optim.Adam(net.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(rank)
    batches = [torch.randn(10, 6, generator=data) for _ in range(5)]
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    update_bn(batches, net)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
