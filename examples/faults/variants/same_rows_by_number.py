"""The model looks its rows up by number, and two of three ranks count from the same one.

Each rank hands its own name along, so that no two batches are equal; two ranks' gradients are.

variant of: everyone_is_rank_zero
seen in: -
ranks: 3
expect: DDP304
cause: train on the same data
stage: local
step: none
outliers: 1 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 5
HOSTS = ("a-0", "b-0", "b-1")


class Lookup(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows
        self.net = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1))

    def forward(self, request):
        return self.net(self.rows[request["first"] : request["first"] + BATCH]).square().mean()


def train():
    host = HOSTS[dist.get_rank()]
    share = "ab".index(host[0])  # of the host, where it should be of the rank
    torch.manual_seed(66)
    model = DDP(Lookup(torch.randn(90, 6)), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for step in range(6):
        optimizer.zero_grad()
        model({"host": host, "first": (3 * step + share) * BATCH}).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
