"""FSDP2, sharded over two ranks of each replica: rank 1 evaluates, and stays in evaluation mode.

variant of: eval_left_on_one_rank
ranks: 4
expect: DDP213
cause: the whole module is in evaluation mode on rank 1 only
stage: forward
step: 3
outliers: 1
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


def train():
    torch.manual_seed(83)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 8))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(180 + dist.get_rank())
    torch.manual_seed(190 + dist.get_rank())
    for step in range(8):
        inputs = torch.randn(8, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs.sin()).backward()
        optimizer.step()
        if step == 2 and dist.get_rank() == 1:
            model.eval()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
