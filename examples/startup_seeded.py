"""No rank reads a file. All ranks build the model from the same seed, so they are equal before the broadcast.

ddpcheck run -- torchrun --nproc-per-node 4 examples/startup_seeded.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from startup_model import build_model, train


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(42)
    train(build_model())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
