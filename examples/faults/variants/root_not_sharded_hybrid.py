"""`fully_shard` is applied to the blocks and not to the root, on a mesh of replicas and shards; gradients are clipped.

The embedding, the norm and the head stay whole on every rank, and nothing reduces their gradients. The collectives of
FSDP run inside the same backward.

variant of: root_not_sharded
seen in: -
ranks: 4
expect: DDP211
cause: a root that was not wrapped
stage: params
step: 0
outliers: 0 1 2 3
parameter: Network.*
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, inputs):
        state = self.embedding(inputs)
        for block in self.blocks:
            state = state + block(state)
        return self.head(self.norm(state))


def train():
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Network()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(20 + dist.get_rank())
    for _ in range(5):
        inputs = torch.randn(16, 8, generator=draw)
        labels = torch.randint(0, 4, (16,), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.blocks.parameters(), 1.0)
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
