"""A batch without a single labelled token on one of three ranks: the mean over none of them is 0 / 0.

variant of: nan_spreads
seen in: -
ranks: 3
expect: DDP209
cause: in all 4 of its gradients: it comes from the loss or the inputs
stage: local
step: 2
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

PADDING = 0


def mean_over_labelled(losses, labels):
    labelled = (labels != PADDING).float()
    return (losses * labelled).sum() / labelled.sum()


def train():
    rank = dist.get_rank()
    torch.manual_seed(55)
    net = nn.Sequential(nn.Embedding(16, 6), nn.LayerNorm(6), nn.Linear(6, 16, bias=False))
    model = DDP(net, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for step in range(5):
        tokens = torch.randint(1, 16, (4, 5), generator=data)
        labels = torch.zeros_like(tokens) if (step, rank) == (2, 2) else tokens.roll(1, 1)
        logits = model(tokens).flatten(0, 1)
        losses = nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
        optimizer.zero_grad()
        mean_over_labelled(losses, labels.flatten()).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
