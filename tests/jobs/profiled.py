"""Two forked ranks train over gloo under torch.profiler; rank 1 comes late to every backward.

python profiled.py FOLDER
"""

from __future__ import annotations

import multiprocessing
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import ProfilerActivity, profile, schedule

RANKS = 2
STEPS = 4
SLEEP = 0.4


def rank_main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS)
    # Each layer fills a bucket, which is 1 MB at least.
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
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(rank, folder)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
