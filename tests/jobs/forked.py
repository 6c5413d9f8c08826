"""A plain training loop with forked ranks and trouble on request; prints a digest of its final weights."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import battery
import torch
import torch.distributed as dist
import variants
from torch.nn.parallel import DistributedDataParallel as DDP


def rank_main(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    variants.make_group(rank, options.world_size)
    ddp = DDP(variants.normed())
    optimizer = variants.sgd(ddp, lr=0.01)
    for step, batch in enumerate(variants.batches(rank, options.steps)):
        _meddle(rank, step, options)
        if step == options.diverge_at and rank == options.world_size - 1:
            with torch.no_grad():
                ddp.module[0].weight[0, 0] += 1.0
        # Ranks that part by losing the reduction go on without waiting for each other.
        alone = 0 <= options.alone_from <= step
        optimizer.zero_grad()
        (ddp.module if alone else ddp)(batch).square().mean().backward()
        optimizer.step()
        # Not until moments of each rank's own: the one that began last would hold up the others at every step.
        time.sleep(options.pause)
    battery.KEPT.append(ddp)
    if rank == 0:
        os.write(1, f"{battery.digest([ddp, optimizer])}\n".encode())
    dist.destroy_process_group()


def _meddle(rank: int, step: int, options: argparse.Namespace) -> None:
    """What may happen to a run folder while the job runs."""
    if rank or step != options.meddle_at or "DDPCHECK_CONFIG" not in os.environ:
        return
    folder = Path(json.loads(os.environ["DDPCHECK_CONFIG"])["run_dir"])
    if options.meddle == "remove":
        shutil.rmtree(folder)
    elif options.meddle == "replace":
        shutil.rmtree(folder)
        folder.write_text("not a folder any more")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--diverge-at", type=int, default=-1)
    parser.add_argument("--alone-from", type=int, default=-1)
    parser.add_argument("--mark", help="no more than a word by which to know the job's processes")
    parser.add_argument("--meddle", default="")
    parser.add_argument("--meddle-at", type=int, default=-1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JOB_STORE"] = os.path.join(folder, "store")
        ranks: list[Any] = [
            context.Process(target=rank_main, args=(rank, options)) for rank in range(options.world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        print([process.exitcode for process in ranks], file=sys.stderr)
    sys.exit(1 if any(process.exitcode for process in ranks) else 0)


if __name__ == "__main__":
    main()
