"""Every rank reads the same checkpoint before wrapping. DDP broadcasts the weights in any case.

    ddpcheck run -- torchrun --nproc-per-node 4 examples/startup_read_by_all.py

The table "Start-up" of the report shows what each rank read, from storage or from the page cache, and how much reading
once would save. `startup_read_by_one.py` reads once; `startup_seeded.py` reads nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from startup_model import build_model, checkpoint, train


def main() -> None:
    dist.init_process_group("gloo")
    path = checkpoint()
    model = build_model()
    model.load_state_dict(torch.load(path, weights_only=True))
    train(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
