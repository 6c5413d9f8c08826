"""Backwards that torch compiles (compiled autograd), and DDP's reducer in Python for them.

There, DDP reduces gradients in hooks of the parameters, before other hooks see them.

ranks: 2
expect: nothing
cases: python_reducer compiled_autograd
torch: 2.6
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._dynamo.compiled_autograd
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def around_backward(case: str) -> AbstractContextManager[Any]:
    if case != "compiled_autograd":
        return nullcontext()
    return torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        drawn = torch.Generator().manual_seed(31 + dist.get_rank())
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 6, generator=drawn)).square().mean()
            with around_backward(case):
                loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
