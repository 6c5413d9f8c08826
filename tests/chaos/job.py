"""The job of the campaign: forked ranks that train and note in a folder of their own how far they got.

    python job.py STATE [--first-rank 0] [--local-ranks 2] [--world-size 2] [--store HOST:PORT]

STATE/pid-R holds the process id of rank R, STATE/steps-R the number of finished steps, STATE/weights-R a digest of
the final state, STATE/descriptors-R what was opened while it trained, and STATE/exits-R the exit statuses of
the ranks from R on. While STATE/leak-R exists, rank R keeps more memory after each step. ddpcheck knows nothing of this
folder.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "jobs"))

import battery
import forking
import torch.distributed as dist
import variants
from torch.nn.parallel import DistributedDataParallel as DDP

# Descriptors that exist from here on are compared with those at the end. Faults strike later.
SETTLED_STEP = 8
LEAK_BYTES = 4 << 20
# How long a rank waits in a collective for one that is gone without closing its connections.
TIMEOUT = timedelta(seconds=15)
# A job of 100 steps takes some 3 seconds.
JOB_SECONDS = 60.0


def rank_main(index: int, options: argparse.Namespace) -> None:
    rank, state = options.first_rank + index, options.state
    if options.store:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{options.store}",
            rank=rank,
            world_size=options.world_size,
            timeout=TIMEOUT,
        )
    else:
        variants.make_group(rank, options.world_size)
    ddp = DDP(variants.normed())
    forking.keep(ddp)
    optimizer = variants.sgd(ddp, lr=0.01)
    log = os.open(state / f"steps-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    # Visible only when it is complete.
    (state / f"pid-{rank}.new").write_text(str(os.getpid()))
    (state / f"pid-{rank}.new").rename(state / f"pid-{rank}")
    leaked, settled = [], {}
    for step, batch in enumerate(variants.batches(rank, options.steps)):
        optimizer.zero_grad()
        ddp(batch).square().mean().backward()
        optimizer.step()
        os.write(log, b".")
        if step == SETTLED_STEP:
            settled = descriptors()
        if (state / f"leak-{rank}").exists():
            leaked.append(b"x" * LEAK_BYTES)
        time.sleep(options.pause)
    more = {number: target for number, target in descriptors().items() if number not in settled}
    (state / f"descriptors-{rank}").write_text("\n".join(more.values()))
    (state / f"weights-{rank}").write_text(battery.digest([ddp, optimizer]))
    dist.destroy_process_group()


def descriptors() -> dict[str, str]:
    """What the open descriptors of this process refer to, without those that a thread has open for a moment."""
    first = _descriptors()
    time.sleep(0.05)
    return {number: target for number, target in _descriptors().items() if first.get(number) == target}


def _descriptors() -> dict[str, str]:
    opened = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            opened[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
    return opened


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("state", type=Path)
    parser.add_argument("--first-rank", type=int, default=0)
    parser.add_argument("--local-ranks", type=int, default=2)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--store", default="", help="address of the store, for ranks on several hosts")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between steps")
    options = parser.parse_args()
    forking.prepare()
    ended = forking.run_ranks(rank_main, options.local_ranks, options, seconds=JOB_SECONDS)
    (options.state / f"exits-{options.first_rank}").write_text(" ".join(map(str, ended.exits)))
    sys.exit(not ended.ok)


if __name__ == "__main__":
    main()
