"""Two forwards, then two backwards: DDP reduces the first backward only.

After a warm-up a second, augmented view joins, with its own loss and its own backward. The second forward arms DDP
anew, the first backward uses that up, and what the second backward adds stays on its rank.

bug: 9
seen in: -
ranks: 2
expect: DDP202
cause: two forwards before two backwards
stage: applied
step: 2
outliers: 0 1
parameter: net.0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 20), nn.Mish(), nn.Linear(20, 6))

    def forward(self, inputs):
        return F.normalize(self.net(inputs), dim=-1)


def train():
    torch.manual_seed(23)
    ddp = DDP(Views())
    optimizer = torch.optim.NAdam(ddp.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(80 + dist.get_rank())
    for step in range(5):
        inputs, target = torch.randn(6, 9, generator=data), torch.randn(6, 6, generator=data)
        optimizer.zero_grad()
        plain = ddp(inputs)
        if step < 2:
            F.mse_loss(plain, target).backward()
        else:
            augmented = ddp(inputs + 0.1 * torch.randn(6, 9, generator=data))
            F.mse_loss(plain, target).backward()
            F.mse_loss(augmented, target).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
