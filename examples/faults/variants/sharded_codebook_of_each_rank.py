"""FSDP1: a codebook is a buffer that each rank moves towards its own inputs. FSDP synchronises no buffer.

variant of: codebook_from_own_data
ranks: 2
also: DDP606
expect: DDP210
cause: buffers that each rank updates from its own data
stage: buffers.end
step: none
outliers: 0 1
parameter: codebook
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F


class Quantiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(8, 4)
        self.decode = nn.Linear(4, 8)
        self.register_buffer("codebook", torch.randn(16, 4))

    def forward(self, inputs):
        hidden = self.encode(inputs)
        nearest = torch.cdist(hidden.detach(), self.codebook).argmin(1)
        if self.training:
            for index in nearest.unique():
                mean = hidden.detach()[nearest == index].mean(0)
                self.codebook[index] += 0.1 * (mean - self.codebook[index])
        return self.decode(hidden + (self.codebook[nearest] - hidden).detach())


def train():
    torch.manual_seed(86)
    model = FullyShardedDataParallel(Quantiser(), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(183 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(16, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), inputs).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
