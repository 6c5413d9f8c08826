"""Jobs whose memory grows, differs between ranks, or only fluctuates, on forked ranks.

python memory_cases.py leak,uneven,steady
"""

from __future__ import annotations

import sys

import forking
import torch
import torch.distributed as dist
import variants
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 80
MEGABYTE = 1 << 18  # values


def rank_main(rank: int, case: str) -> None:
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
            # Sizes that change, a cache that fills in the first steps, one large evaluation.
            kept = kept if len(kept) > 5 else [*kept, torch.ones(20 * MEGABYTE)]
            torch.ones((1 + step % 7) * MEGABYTE)
            if step == STEPS // 2:
                torch.ones(300 * MEGABYTE)
    forking.keep(ddp)
    dist.destroy_process_group()


def main() -> None:
    forking.prepare()
    for case in sys.argv[1].split(","):
        ended = forking.run_ranks(rank_main, 2, case)
        if not ended.ok:
            sys.exit(f"{case}: {ended.exits}")


if __name__ == "__main__":
    main()
