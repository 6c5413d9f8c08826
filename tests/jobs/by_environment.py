"""A rank started by torchrun, or by a shell with RANK, WORLD_SIZE and MASTER_* set."""

from __future__ import annotations

import torch.distributed as dist
from loop import batches, train


def main() -> None:
    dist.init_process_group("gloo")
    train(batches())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
