"""`broadcast_buffers=False`, and one rank of three computed its table with another library version.

variant of: buffers_never_broadcast
seen in: -
ranks: 3
expect: DDP101
cause: broadcast_buffers=False
stage: init.after
step: none
outliers: 2
parameter: positions
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Positioned(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.register_buffer("positions", torch.sin(torch.arange(6.0).unsqueeze(1) / base ** torch.arange(4)))
        self.layer = nn.TransformerEncoderLayer(4, 1, 8, dropout=0.0, batch_first=True)

    def forward(self, sequence):
        return self.layer(sequence + self.positions)


def train():
    rank = dist.get_rank()
    torch.manual_seed(40)
    model = DDP(Positioned(base=10.0 if rank != 2 else 10.001), broadcast_buffers=False)
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 6, 4, generator=data)).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
