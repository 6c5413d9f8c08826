"""A resumed job skips the batches that were used, counted in optimizer steps: half of them are used twice.

The job accumulates two micro-batches per step. The step is saved, and as many batches are skipped.

variant of: set_epoch_forgotten
seen in: -
ranks: 2
expect: DDP216
cause: the position within the epoch was restored wrongly
step: 0
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


def run(path, last_step=None):
    drawn = torch.Generator().manual_seed(9)
    dataset = TensorDataset(torch.randn(192, 6, generator=drawn), torch.randint(3, (192,), generator=drawn))
    torch.manual_seed(71)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    resumed = torch.load(path, weights_only=True) if os.path.exists(path) else {"step": 0}
    if "model" in resumed:
        model.load_state_dict(resumed["model"])
    ddp = DDP(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    if "model" in resumed:
        optimizer.load_state_dict(resumed["optimizer"])
    sampler = DistributedSampler(dataset)
    sampler.set_epoch(0)
    step = resumed["step"]
    dist.barrier()
    for number, (inputs, labels) in enumerate(DataLoader(dataset, batch_size=8, sampler=sampler)):
        if number < resumed["step"]:
            continue
        F.cross_entropy(ddp(inputs), labels).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == last_step:
                break
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
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
    run(path, last_step=4)
    dist.destroy_process_group()
    # The same job, started again: as under torchrun, which keeps its store over restarts.
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank, world_size=ranks)
    run(path)
    dist.destroy_process_group()
    if rank == 0:
        shutil.rmtree(folders[0])


if __name__ == "__main__":
    main()
