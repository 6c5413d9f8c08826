"""Gradients clipped by each rank's own history of norms.

The threshold follows the median norm that this rank has seen of its *local* gradients. Every rank clips the
same averaged gradient by another number, and steps its own way.

bug: 21
seen in: DeepSpeed PR#1801
ranks: 2
expect: DDP205
cause: scaled by different factors
stage: applied
step: 3
outliers: 0 1
parameter: encoder.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WARM_UP = 3


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(12, 24)
        self.decoder = nn.Linear(24, 1)

    def forward(self, inputs):
        return self.decoder(torch.relu(self.encoder(inputs)))


def train():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Regressor())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    losses = []
    for step in range(7):
        inputs = torch.randn(16, 12) * (1 + rank)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        if step >= WARM_UP:
            usual = sorted(losses)[len(losses) // 2]
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.01 * usual)
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
