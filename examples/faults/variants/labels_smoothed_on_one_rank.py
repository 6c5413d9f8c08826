"""One rank's configuration is older: there the loss smooths its labels, on the others it does not.

variant of: dropout_from_own_loss
seen in: -
ranks: 3
expect: DDP213
cause: label smoothing of the loss differs: 0.0 on ranks 0 and 2; 0.1 on rank 1
stage: backward
step: 0
outliers: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

OLD_SETTINGS = {"label_smoothing": 0.1}


def train():
    rank = dist.get_rank()
    settings = OLD_SETTINGS if rank == 1 else {}
    torch.manual_seed(53)
    model = DDP(nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 5)))
    criterion = nn.CrossEntropyLoss(**settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(8):
        inputs = torch.randn(12, 10, generator=drawn)
        optimizer.zero_grad()
        criterion(model(inputs), inputs[:, :5].argmax(1)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
