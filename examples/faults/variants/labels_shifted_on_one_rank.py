"""One rank still corrects labels that once counted from one: it teaches the model another meaning of each class.

variant of: labels_numbered_from_a_set
seen in: -
ranks: 3
expect: DDP307
cause: labels are mapped to other classes after the data loader
stage: backward
step: 0
outliers: 1
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 5
COUNTS_FROM_ONE = 1  # the rank with the older copy of the file


def train():
    drawn = torch.Generator().manual_seed(4)
    inputs = torch.randn(384, 12, generator=drawn)
    dataset = TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))
    torch.manual_seed(67)
    ddp = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, CLASSES)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for pictures, labels in DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset)):
        if dist.get_rank() == COUNTS_FROM_ONE:
            labels = (labels - 1) % CLASSES
        optimizer.zero_grad()
        F.cross_entropy(ddp(pictures), labels).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
