"""Jobs whose local gradients other ranks compute again: with random numbers, state and precision that must be the same.

ranks: 2 3
expect: nothing
options: --audit every=2
cases: dropout_and_augmentation batch_norm accumulated mixed_precision recomputed unused_now_and_then
"""

from __future__ import annotations

import contextlib
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, STEPS = 12, 4, 8


class Net(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.first, self.norm = nn.Linear(WIDTH, 32), nn.BatchNorm1d(32)
        self.middle, self.spare = nn.Linear(32, 32), nn.Linear(32, 32)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(32, CLASSES)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.case == "dropout_and_augmentation":
            # Generators of Python and of torch.
            inputs = inputs.roll(random.randrange(3), 1) + 0.1 * torch.randn_like(inputs)
        hidden = self.first(inputs)
        if self.case in ("batch_norm", "accumulated"):
            hidden = self.norm(hidden)
        else:
            hidden = hidden + 0.0 * (self.norm.weight + self.norm.bias).sum()
        if self.case == "recomputed":
            hidden = checkpoint(self.block, hidden, use_reentrant=False)
        else:
            hidden = self.block(hidden)
        if self.case == "unused_now_and_then" and self.seen % 3:
            return self.last(hidden)
        return self.last(hidden + self.spare(hidden))

    def block(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.drop(self.middle(hidden.relu()).relu())


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(81)
    net = Net(case)
    if case == "unused_now_and_then":
        net.norm.requires_grad_(False)
    model = DDP(net, find_unused_parameters=case == "unused_now_and_then")
    torch.manual_seed(800 + rank)
    random.seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=case == "mixed_precision")
    micro_batches = 3 if case == "accumulated" else 1
    for _ in range(STEPS):
        for number in range(micro_batches):
            inputs = torch.randn(8, WIDTH)
            apart = model.no_sync() if number < micro_batches - 1 else contextlib.nullcontext()
            with apart:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "mixed_precision"):
                    outputs = model(inputs)
                loss = F.cross_entropy(outputs.float(), inputs[:, :CLASSES].argmax(1)) / micro_batches
                scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
