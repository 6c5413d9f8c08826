"""Jobs that are long enough to be timed, and reduce as often as they have to, or cheaply.

ranks: 2
expect: nothing
cases: once_per_step accumulated_in_no_sync clipped_micro_batches
"""

from __future__ import annotations

import contextlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 4), nn.Linear(4, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    parts = 1 if case == "once_per_step" else 3
    for _ in range(30):
        for part in range(parts):
            inputs = torch.randn(4, 256, generator=drawn)
            quiet = case == "accumulated_in_no_sync" and part < parts - 1
            with model.no_sync() if quiet else contextlib.nullcontext():
                loss = (model(inputs) - inputs[:, :8]).square().mean()
                if case == "clipped_micro_batches":
                    time.sleep(0.05)  # a forward that takes its time
                loss.backward()
            if case == "clipped_micro_batches":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
