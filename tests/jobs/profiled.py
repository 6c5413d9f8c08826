"""Two forked ranks train over gloo under torch.profiler; rank 1 is late at every backward.

python profiled.py FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import forking
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, schedule

RANKS = 2
STEPS = 4
SLEEP = 0.4


def rank_main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS)
    # Each layer fills one bucket: a bucket holds at least 1 MB.
    ddp = DDP(nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    window = schedule(wait=1, warmup=1, active=2)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=window) as profiler:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = ddp(torch.randn(64, 512)).square().mean()
            time.sleep(SLEEP * rank)
            loss.backward()
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json.gz"))
    dist.destroy_process_group()


def main() -> None:
    forking.prepare()
    sys.exit(not forking.run_ranks(rank_main, RANKS, Path(sys.argv[1])).ok)


if __name__ == "__main__":
    main()
