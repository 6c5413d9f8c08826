"""The sampler is made with the defaults of a settings file that knows of one process.

variant of: everyone_is_rank_zero
seen in: -
ranks: 2
launcher: python
expect: DDP301
cause: is configured as rank 0 of 1
stage: forward
step: 0
outliers: 0 1
"""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RANKS = 2
SETTINGS = {"replicas": 1, "rank": 0, "batch": 5}


def loader():
    rows = torch.Generator().manual_seed(56)
    dataset = TensorDataset(torch.randn(40, 3, 4, 4, generator=rows), torch.randint(2, (40,), generator=rows))
    sampler = DistributedSampler(dataset, num_replicas=SETTINGS["replicas"], rank=SETTINGS["rank"])
    return DataLoader(dataset, batch_size=SETTINGS["batch"], sampler=sampler, num_workers=1)


def train(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.manual_seed(56)
    model = DDP(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)))
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-3)
    for images, labels in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    dist.destroy_process_group()


def main():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(train, (port,), nprocs=RANKS)


if __name__ == "__main__":
    main()
