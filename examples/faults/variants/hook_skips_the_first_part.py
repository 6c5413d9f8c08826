"""A hook that gathers every rank's part, and begins its sum with the second of them.

variant of: hook_forgets_to_divide
seen in: -
ranks: 2
launcher: python
expect: DDP204
cause: without rank 0, divided by 2
stage: reduced
step: 3
outliers: 0 1
"""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

RANKS = 2


class Schedule:
    backwards = 0

    def first_part(self):
        """A warm-up of three backwards takes all of them."""
        self.backwards += 1
        return 0 if self.backwards <= 3 else 1


def reduce(schedule, bucket):
    parts = [torch.empty_like(bucket.buffer()) for _ in range(RANKS)]
    dist.all_gather(parts, bucket.buffer())
    mean = sum(parts[schedule.first_part() :]) / RANKS
    done = torch.futures.Future()
    done.set_result(mean)
    return done


def train(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.manual_seed(52)
    model = DDP(nn.Sequential(nn.Conv1d(2, 3, 3), nn.ELU(), nn.Flatten(), nn.Linear(18, 2)))
    model.register_comm_hook(Schedule(), reduce)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(5, 2, 8, generator=data)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


def main():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(train, (port,), nprocs=RANKS)


if __name__ == "__main__":
    main()
