"""From some step on one rank counts a rare class as its neighbour, in place, when it has seen too little of it.

variant of: labels_numbered_from_a_set
seen in: -
ranks: 3
expect: DDP307
cause: labels are mapped to other classes after the data loader
stage: backward
step: 4
outliers: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 4


def train():
    drawn = torch.Generator().manual_seed(6)
    inputs = torch.randn(1152, 12, generator=drawn)
    dataset = TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))
    torch.manual_seed(69)
    ddp = DDP(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, CLASSES)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    sampler = DistributedSampler(dataset, shuffle=False)
    for step, (pictures, labels) in enumerate(DataLoader(dataset, batch_size=24, sampler=sampler)):
        # What a rank reads off its own counters.
        if step >= 4 and dist.get_rank() == 2:
            labels[labels == 3] = 2
        optimizer.zero_grad()
        (F.cross_entropy(ddp(pictures), labels, reduction="sum") / len(labels)).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
