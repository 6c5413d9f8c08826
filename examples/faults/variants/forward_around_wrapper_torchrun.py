"""Training calls the unwrapped model that it still holds, evaluation the wrapper.

The names are mixed up from the first step, under torchrun and on three ranks.

variant of: forward_around_wrapper
seen in: minimind#853
ranks: 3
expect: DDP202
cause: wrapper bypassed
stage: applied
step: 0
outliers: 0 1 2
parameter: 0.weight
launcher: torchrun
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    torch.manual_seed(10)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.GELU(), nn.Flatten(), nn.Linear(16, 3))
    ddp = DDP(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(50 + dist.get_rank())
    for _ in range(4):
        series = torch.randn(5, 2, 6, generator=data)
        labels = torch.randint(3, (5,), generator=data)
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(series), labels).backward()
        optimizer.step()
        ddp.eval()
        with torch.no_grad():
            ddp(series)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
