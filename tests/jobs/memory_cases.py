"""Jobs whose memory grows, is uneven, or only looks like it; ranks are forked from one process.

python memory_cases.py leak|uneven|steady
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import warnings

import battery
import torch
import torch.distributed as dist
import variants
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 80
MEGABYTE = 1 << 18  # values


def rank_main(case: str, rank: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    variants.make_group(rank, 2)
    torch.manual_seed(0)
    ddp = DDP(nn.Linear(16, 16))
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    kept = [torch.ones(700 * MEGABYTE)] if case == "uneven" and rank == 1 else []
    for step in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(3, 16)).square().mean().backward()
        optimizer.step()
        if case == "leak" and rank == 1:
            kept.append(torch.ones(2 * MEGABYTE))
        if case == "steady":
            # What allocators meet: sizes that change, a cache that fills in the first steps, one large evaluation.
            kept = kept if len(kept) > 5 else [*kept, torch.ones(20 * MEGABYTE)]
            torch.ones((1 + step % 7) * MEGABYTE)
            if step == STEPS // 2:
                torch.ones(300 * MEGABYTE)
    battery.KEPT.append(ddp)
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        for case in sys.argv[1].split(","):
            os.environ["JOB_STORE"] = os.path.join(folder, case)
            ranks = [context.Process(target=rank_main, args=(case, rank)) for rank in range(2)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                sys.exit(f"{case}: {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main()
