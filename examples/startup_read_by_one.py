"""Only rank 0 reads the checkpoint. The others wait in DDP's constructor and receive the weights by broadcast.

ddpcheck run -- torchrun --nproc-per-node 4 examples/startup_read_by_one.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from startup_model import build_model, checkpoint, train


def main() -> None:
    dist.init_process_group("gloo")
    path = checkpoint()
    model = build_model()
    if dist.get_rank() == 0:
        model.load_state_dict(torch.load(path, weights_only=True))
    train(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
