"""A plain training loop on forked ranks, with faults on request; rank 0 prints a digest of the final state."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

import battery
import forking
import torch
import torch.distributed as dist
import variants
from torch.nn.parallel import DistributedDataParallel as DDP


def rank_main(rank: int, options: argparse.Namespace) -> None:
    variants.make_group(rank, options.world_size)
    ddp = DDP(variants.normed())
    forking.keep(ddp)
    optimizer = variants.sgd(ddp, lr=0.01)
    for step, batch in enumerate(variants.batches(rank, options.steps)):
        _damage_run_folder(rank, step, options)
        if step == options.diverge_at and rank == options.world_size - 1:
            with torch.no_grad():
                ddp.module[0].weight[0, 0] += 1.0
        # Without the reduction, ranks do not wait for each other.
        unreduced = 0 <= options.alone_from <= step
        optimizer.zero_grad()
        (ddp.module if unreduced else ddp)(batch).square().mean().backward()
        optimizer.step()
        # A pause of fixed length. If each rank waited for points on its own clock instead, the rank that started last
        # would delay the others at every step.
        time.sleep(options.pause)
    if rank == 0:
        os.write(1, f"{battery.digest([ddp, optimizer])}\n".encode())
    dist.destroy_process_group()


def _damage_run_folder(rank: int, step: int, options: argparse.Namespace) -> None:
    if rank or step != options.damage_at or "DDPCHECK_CONFIG" not in os.environ:
        return
    folder = Path(json.loads(os.environ["DDPCHECK_CONFIG"])["run_dir"])
    shutil.rmtree(folder)
    if options.damage == "replace":
        folder.write_text("a file in place of the run folder")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument(
        "--diverge-at", type=int, default=-1, help="the last rank writes to a weight at this step"
    )
    parser.add_argument("--alone-from", type=int, default=-1, help="forward bypasses DDP from this step on")
    parser.add_argument("--mark", help="a word in the command line, to find the job's processes by")
    parser.add_argument("--damage", choices=("remove", "replace"), help="what rank 0 does to the run folder")
    parser.add_argument("--damage-at", type=int, default=-1)
    options = parser.parse_args()
    forking.prepare()
    ended = forking.run_ranks(rank_main, options.world_size, options, seconds=200.0)
    if not ended.ok:
        print(ended.exits, file=sys.stderr)
    sys.exit(not ended.ok)


if __name__ == "__main__":
    main()
