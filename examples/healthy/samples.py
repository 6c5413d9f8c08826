"""Samples that differ between ranks or epochs by design, and samples that do not differ.

ranks: 2
expect: nothing
cases: fixed augmented noisy_labels masked_tokens drawn_per_rank own_shards sorted_in_the_batch augmented_once
  two_views workers few_classes texts
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, TensorDataset

SIZE, WIDTH = 96, 12


class Samples(Dataset[Any]):
    def __init__(self, case: str) -> None:
        self.case = case
        drawn = torch.Generator().manual_seed(6)
        self.inputs = torch.randn(SIZE, WIDTH, generator=drawn)
        self.labels = torch.randint(2 if case == "few_classes" else 6, (SIZE,), generator=drawn)
        self.tokens = torch.randint(50, (SIZE, WIDTH), generator=drawn)
        # Each rank keeps a noisy copy of its own.
        self.copies = self.inputs + 0.1 * torch.randn(SIZE, WIDTH)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        inputs, label = self.inputs[index], int(self.labels[index])
        if self.case in ("augmented", "workers"):
            return inputs + 0.1 * torch.randn(WIDTH), label
        if self.case == "noisy_labels":
            return inputs, label if torch.rand(()) < 0.7 else int(torch.randint(6, ()))
        if self.case == "masked_tokens":
            masked = torch.rand(WIDTH) < 0.2
            return (
                inputs,
                torch.where(masked, 0, self.tokens[index]),
                torch.where(masked, self.tokens[index], -100),
            )
        if self.case == "augmented_once":
            return self.copies[index], label
        if self.case == "two_views":
            return inputs + 0.1 * torch.randn(WIDTH), inputs + 0.1 * torch.randn(WIDTH)
        if self.case == "texts":
            return {"inputs": inputs, "text": f"caption {label}", "label": label}
        return inputs, label


def longest_first(samples: list[Any]) -> Any:
    ordered = sorted(samples, key=lambda sample: float(sample[0][0]), reverse=True)
    return torch.stack([inputs for inputs, _ in ordered]), torch.tensor([label for _, label in ordered])


def loader_of(case: str) -> tuple[DataLoader[Any], Any]:
    torch.manual_seed(600 + dist.get_rank())
    if case == "drawn_per_rank":
        # As in benchmarks: the data do not matter.
        dataset: Dataset[Any] = TensorDataset(torch.randn(SIZE, WIDTH), torch.randint(6, (SIZE,)))
    elif case == "own_shards":
        dataset = TensorDataset(torch.randn(SIZE, WIDTH), torch.arange(SIZE) % 6)
        return DataLoader(dataset, batch_size=8, sampler=RandomSampler(dataset)), None
    else:
        dataset = Samples(case)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    collate = longest_first if case == "sorted_in_the_batch" else None
    workers = 2 if case == "workers" else 0
    return DataLoader(
        dataset, batch_size=8, sampler=sampler, collate_fn=collate, num_workers=workers
    ), sampler


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(66)
    model = DDP(nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader, sampler = loader_of(case)
    for epoch in range(4):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            inputs = batch["inputs"] if isinstance(batch, dict) else batch[0]
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
