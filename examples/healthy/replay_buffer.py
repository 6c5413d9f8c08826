"""Memory that grows until a buffer is full, and then stays: a replay buffer, early and shortly before the end.

ranks: 2
expect: nothing
cases: full_halfway full_late
launcher: environment
"""

from __future__ import annotations

import collections
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 240


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    own = torch.Generator().manual_seed(dist.get_rank())
    share = 0.5 if case == "full_halfway" else 0.7
    replay: collections.deque[torch.Tensor] = collections.deque(maxlen=int(share * STEPS))
    for _ in range(STEPS):
        # One episode of observations: 1 MiB, and with it 220 MiB in the end.
        replay.append(torch.randn(1 << 14, 16, generator=own))
        chosen = replay[int(torch.randint(len(replay), (), generator=own))]
        batch = chosen[torch.randint(len(chosen), (32,), generator=own)]
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
