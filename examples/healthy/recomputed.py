"""Models that are compiled, and models whose activations are computed a second time.

ranks: 2
expect: nothing
cases: compiled_module compiled_wrapper compiled_step checkpointed checkpointed_reentrant checkpointed_blocks
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Blocks(nn.Module):
    """Residual blocks that may be computed again in the backward."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 2)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.SiLU()) for _ in range(4)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(inputs)
        if self.case == "checkpointed_blocks":
            hidden = checkpoint_sequential(self.blocks, 2, hidden, use_reentrant=False)
        elif self.case.startswith("checkpointed"):
            hidden = checkpoint(self.blocks, hidden, use_reentrant=self.case.endswith("reentrant"))
        else:
            hidden = self.blocks(hidden)
        return self.head(hidden)


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(19)
    blocks: nn.Module = Blocks(case)
    if case == "compiled_module":
        blocks = torch.compile(blocks, backend="aot_eager")
    model = DistributedDataParallel(blocks, static_graph=case == "checkpointed_reentrant")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    forward = torch.compile(model, backend="aot_eager") if case == "compiled_wrapper" else model
    step = torch.compile(optimizer.step, backend="eager") if case == "compiled_step" else optimizer.step
    drawn = torch.Generator().manual_seed(2 + dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        forward(torch.randn(6, 8, generator=drawn)).square().mean().backward()
        step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
