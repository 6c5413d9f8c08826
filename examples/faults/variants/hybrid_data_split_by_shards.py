"""Hybrid sharding (HSDP) on 2 x 2 ranks: the sampler divides the data among the shards of one replica only.

Its number of replicas and its rank are those of the mesh dimension "shards". The other replica trains on the same
batches.

variant of: sampler_of_a_single_rank
ranks: 4
expect: DDP301
cause: configured as rank 0 of 2, but 4 ranks train
stage: forward
step: 0
outliers: 0 2
torch: 2.6
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train():
    torch.manual_seed(94)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    dataset = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    shards = mesh["shards"]
    sampler = DistributedSampler(dataset, num_replicas=shards.size(), rank=shards.get_local_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(dataset, batch_size=8, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
