"""Ranks begin with seeds of their own, until a call "for reproducibility" in mid-run gives all the same one.

variant of: same_dropout_masks
seen in: -
ranks: 2
launcher: environment
expect: DDP306
cause: seeded its generator with the same number
stage: forward
step: 3
outliers: 0 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train():
    rank = dist.get_rank()
    torch.manual_seed(60 + rank)
    net = nn.Sequential(nn.Embedding(20, 8), nn.Dropout(0.2), nn.Flatten(), nn.Linear(32, 4), nn.Dropout(0.1))
    model = DDP(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    for step in range(12):
        if step == 3:
            torch.manual_seed(0)
        words, labels = torch.randint(20, (6, 4), generator=data), torch.randint(4, (6,), generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
