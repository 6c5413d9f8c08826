"""A layer is left out of one step: DDP waits for its gradients and reduces nothing.

The auxiliary head is dropped for the last step. Its gradients never come, so DDP does not finish the reduction, and the
step applies what each rank computed alone. DDP would complain at the next forward, but there is none: the checkpoint
written now is rank 0's own.

bug: 4
seen in: pytorch#112152
ranks: 2
expect: DDP202
cause: no gradient arrived for auxiliary.weight, auxiliary.bias
stage: applied
step: 3
outliers: 0 1
parameter: auxiliary.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv1d(2, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Flatten())
        self.main = nn.Linear(48, 5)
        self.auxiliary = nn.Linear(48, 2)

    def forward(self, series, with_auxiliary):
        hidden = self.trunk(series)
        return self.main(hidden), self.auxiliary(hidden) if with_auxiliary else None


def train():
    torch.manual_seed(5)
    ddp = DDP(TwoHeads())
    optimizer = torch.optim.RMSprop(ddp.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(9 + dist.get_rank())
    steps = 4
    for step in range(steps):
        series = torch.randn(6, 2, 6, generator=data)
        labels = torch.randint(5, (6,), generator=data)
        optimizer.zero_grad()
        scores, extra = ddp(series, with_auxiliary=step < steps - 1)
        loss = F.cross_entropy(scores, labels)
        if extra is not None:
            loss = loss + 0.3 * F.cross_entropy(extra, labels % 2)
        loss.backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
