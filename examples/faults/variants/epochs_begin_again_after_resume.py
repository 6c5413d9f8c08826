"""A resumed job counts its epochs from zero again: the sampler shuffles as in the first epochs of the earlier run.

Weights and optimizer are restored. The order of the samples is not: what the model saw first, it sees again in the same
order, and an order that it has not seen never comes.

variant of: set_epoch_forgotten
seen in: -
ranks: 2
expect: DDP216
cause: the number of the epoch was not restored
step: 1
outliers: 0
"""

import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def run(path, epochs):
    drawn = torch.Generator().manual_seed(9)
    dataset = TensorDataset(torch.randn(96, 6, generator=drawn), torch.randint(3, (96,), generator=drawn))
    torch.manual_seed(70)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    resumed = torch.load(path, weights_only=True) if os.path.exists(path) else None
    if resumed:
        model.load_state_dict(resumed["model"])
    ddp = DDP(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    if resumed:
        optimizer.load_state_dict(resumed["optimizer"])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    dist.barrier()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(ddp(inputs), labels).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()


def main():
    torch.set_num_threads(1)
    folders = [tempfile.mkdtemp()]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=rank == 0
    )
    dist.init_process_group("gloo", store=dist.PrefixStore("first", store), rank=rank, world_size=ranks)
    dist.broadcast_object_list(folders)
    path = os.path.join(folders[0], "last.pt")
    run(path, epochs=2)
    dist.destroy_process_group()
    # The same job, started again: as under torchrun, which keeps its store over restarts.
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=ranks)
    run(path, epochs=2)
    dist.destroy_process_group()
    if rank == 0:
        shutil.rmtree(folders[0])


if __name__ == "__main__":
    main()
