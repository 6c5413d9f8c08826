"""Rank 1 fails at step 2 in the first attempt of an elastic job; the second attempt succeeds."""

from __future__ import annotations

import os

import torch.distributed as dist
from loop import batches, train


def fail_once(step: int) -> None:
    if (dist.get_rank(), step, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (1, 2, "0"):
        raise RuntimeError("the disk is on fire")


def main() -> None:
    dist.init_process_group("gloo")
    train(batches(4), before_step=fail_once)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
