"""Jobs in which one rank is killed at a random moment, on ranks forked from this process.

python killed.py --jobs 20 --out results.json
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import forking
import torch
import torch.distributed as dist
import variants
from torch.nn.parallel import DistributedDataParallel as DDP

WORLD_SIZE = 3
MAX_DELAY = 1.0
# How long ranks may take to end once a peer is gone.
END_SECONDS = 60.0


def rank_main(rank: int, started: Any, stacks: Path) -> None:
    faulthandler.register(signal.SIGUSR2, stacks.open("w"))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Ranks that lost a peer print long errors.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    variants.make_group(rank, WORLD_SIZE)
    started.send_bytes(b"x")
    ddp = DDP(variants.normed())
    optimizer = variants.sgd(ddp)
    for batch in variants.batches(rank, 10_000):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        time.sleep(0.002)
    dist.destroy_process_group()


def run_job(number: int) -> dict[str, Any]:
    """Odd jobs stop the other ranks at once, as launchers do; in even jobs these fail by themselves."""
    chance = random.Random(number)
    victim, delay = chance.randrange(WORLD_SIZE), chance.uniform(0, MAX_DELAY)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(WORLD_SIZE)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JOB_STORE"] = os.path.join(folder, "store")
        stacks = [Path(folder, f"stacks-{rank}") for rank in range(WORLD_SIZE)]
        ranks = [
            context.Process(target=rank_main, args=(rank, pipes[rank][1], stacks[rank]))
            for rank in range(WORLD_SIZE)
        ]
        for process in ranks:
            process.start()
        pipes[victim][0].recv_bytes()
        time.sleep(delay)
        os.kill(ranks[victim].pid or 0, signal.SIGKILL)
        for process in ranks:
            if number % 2 and process is not ranks[victim]:
                process.terminate()
        for process in ranks:
            process.join(END_SECONDS)
        late = [
            _stacks(process, path) for process, path in zip(ranks, stacks, strict=True) if process.is_alive()
        ]
        for process in ranks:
            process.kill()
            process.join()
    return {"victim": victim, "delay": delay, "exits": [rank.exitcode for rank in ranks], "late": late}


def _stacks(process: Any, path: Path) -> str:
    """The stack of each thread of a rank that should have ended."""
    os.kill(process.pid, signal.SIGUSR2)
    time.sleep(1)
    return path.read_text() or "no stack was written"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    forking.prepare()
    results = [run_job(number) for number in range(options.first, options.first + options.jobs)]
    options.out.write_text(json.dumps(results, indent=1))
    sys.exit(9)


if __name__ == "__main__":
    main()
