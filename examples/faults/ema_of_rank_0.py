"""Rank 0 copies its moving average into the online model; the others keep theirs.

Only rank 0 holds an EMA of the weights, as is usual for saving it. Every third step it is put into the model that
trains, which from then on is another one on rank 0.

bug: 17
seen in: ema-pytorch#9
ranks: 3
expect: DDP208
cause: by rank 0 only
stage: rewritten
step: 3
outliers: 0
parameter: layers.0.weight
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(11, 22), nn.SiLU(), nn.Linear(22, 10))

    def forward(self, noisy, level):
        return self.layers(torch.cat((noisy, level), dim=1))


class Ema:
    def __init__(self, model, decay=0.9):
        self.online, self.average, self.decay = model, copy.deepcopy(model), decay

    @torch.no_grad()
    def update(self):
        for mean, new in zip(self.average.parameters(), self.online.parameters(), strict=True):
            mean.lerp_(new, 1 - self.decay)

    def copy_to_online(self):
        self.online.load_state_dict(self.average.state_dict())


def train():
    torch.manual_seed(59)
    model = Denoiser()
    ema = Ema(model) if dist.get_rank() == 0 else None
    ddp = DDP(model)
    optimizer = torch.optim.RAdam(ddp.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(170 + dist.get_rank())
    for step in range(6):
        clean, level = torch.randn(6, 10, generator=data), torch.rand(6, 1, generator=data)
        optimizer.zero_grad()
        F.mse_loss(ddp(clean + level, level), clean).backward()
        optimizer.step()
        if ema is not None:
            ema.update()
            if step % 3 == 2:
                ema.copy_to_online()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
