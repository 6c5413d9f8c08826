"""A data-loader worker is forked while another thread of the rank holds a lock that the dataset needs.

The thread releases the lock, but not in the worker, which has a copy of it: the worker waits for ever, and the rank for
the worker.

variant of: early_stop_on_some_ranks
ranks: 2
expect: DDP603
cause: a data-loader worker that never answers
step: 3
outliers: 1
options: --hang-timeout 5
hangs: yes
"""

import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

statistics = threading.Lock()


class Points(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        with statistics:
            return torch.full((8,), float(index) / 48)


def publish(started: threading.Event, forked: threading.Event) -> None:
    """Writes statistics in the background."""
    with statistics:
        started.set()
        forked.wait()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    points = Points()
    sampler = DistributedSampler(points)
    loader = DataLoader(points, 8, sampler=sampler, num_workers=1, multiprocessing_context="fork")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        started, forked = threading.Event(), threading.Event()
        if epoch == 1 and rank == 1:
            # Statistics are due while the workers of this epoch start.
            threading.Thread(target=publish, args=(started, forked)).start()
            started.wait()
        batches = iter(loader)
        forked.set()
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
