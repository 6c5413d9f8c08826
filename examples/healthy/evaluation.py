"""Evaluation by all ranks between epochs, on shares of the data or on all of it.

ranks: 1 2 3
expect: nothing
cases: through_wrapper all_of_it metrics_gathered only_evaluated
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def table(rows: int, seed: int) -> TensorDataset:
    inputs = torch.randn(rows, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.mean((2, 3)).argmax(1))


def evaluate(case: str, model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = seen = 0.0
    with torch.no_grad():
        for inputs, labels in loader:
            right += (model(inputs).argmax(1) == labels).sum().item()
            seen += len(labels)
    model.train()
    if case == "metrics_gathered":
        everybodys: list[tuple[float, float]] = [(0.0, 0.0)] * dist.get_world_size()
        dist.all_gather_object(everybodys, (right, seen))
        right, seen = (sum(column) for column in zip(*everybodys, strict=True))
    return right / seen


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(10)
    model = DistributedDataParallel(
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rows, held_out = table(48, 1), table(24, 2)
    sampler: DistributedSampler = DistributedSampler(rows)
    loader = DataLoader(rows, batch_size=4, sampler=sampler)
    share = None if case == "all_of_it" else DistributedSampler(held_out, shuffle=False)
    tests = DataLoader(held_out, batch_size=8, sampler=share)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in loader if case != "only_evaluated" else ():
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        evaluate(case, model, tests)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
