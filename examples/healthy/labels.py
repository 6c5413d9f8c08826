"""Labels that programs change after the data loader: alike on all ranks, at random, or for a part of the samples.

ranks: 2 3
expect: nothing
cases: as_returned shifted_everywhere shifted_later noisy noisy_in_one_class mixed_up left_out own_classes_left_out
  pseudo_labels next_words sorted_by_class one_batch_early own_tasks checkpointed_loss reordered_in_the_batch
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, WIDTH, BATCH, STEPS = 4, 12, 16, 24


def data_of(case: str) -> tuple[torch.Tensor, torch.Tensor]:
    size = BATCH * STEPS * dist.get_world_size()
    drawn = torch.Generator().manual_seed(7 + (dist.get_rank() if case == "own_tasks" else 0))
    inputs = torch.randn(size, WIDTH, generator=drawn)
    labels = inputs[:, :CLASSES].argmax(1)
    if case == "next_words":
        return inputs, torch.randint(CLASSES, (size, WIDTH), generator=drawn)
    if case in ("sorted_by_class", "one_batch_early"):
        order = labels.argsort(stable=True)
        return inputs[order], labels[order]
    return inputs, labels


def early(loader: DataLoader[Any]) -> Iterator[Any]:
    """Fetches the next batch before it returns one, as prefetchers do."""
    kept = None
    for batch in loader:
        if kept is not None:
            yield kept
        kept = batch
    yield kept


def changed(
    case: str, step: int, labels: torch.Tensor, outputs: torch.Tensor, drawn: torch.Generator
) -> torch.Tensor:
    rank = dist.get_rank()
    coin = torch.rand(labels.shape, generator=drawn)
    if case == "shifted_everywhere" or (case == "shifted_later" and step >= 10):
        return (labels + 1) % CLASSES
    if case == "noisy":
        return torch.where(coin < 0.1, torch.randint(CLASSES, labels.shape, generator=drawn), labels)
    if case == "noisy_in_one_class":
        return torch.where((coin < 0.4) & (labels == 3), 2, labels)
    if case == "left_out":
        return torch.where(coin < 0.3, -100, labels)
    if case == "own_classes_left_out":
        # Each rank has annotations of some classes only.
        return torch.where(labels == rank, -100, labels)
    if case == "pseudo_labels":
        return outputs.detach().argmax(1)
    if case == "own_tasks":
        # Each rank has a task, with data and a table of its own.
        return (labels + rank) % CLASSES
    if case == "reordered_in_the_batch":
        return labels[labels.argsort()]
    return labels


def loss_of(case: str, step: int, outputs: torch.Tensor, labels: torch.Tensor, drawn: Any) -> torch.Tensor:
    if case == "mixed_up":
        order = torch.randperm(len(labels), generator=drawn)
        return 0.7 * F.cross_entropy(outputs, labels) + 0.3 * F.cross_entropy(outputs, labels[order])
    targets = changed(case, step, labels, outputs, drawn)
    if case == "checkpointed_loss":
        loss: torch.Tensor = checkpoint(
            lambda: F.cross_entropy(outputs, targets, label_smoothing=0.1), use_reentrant=False
        )
        return loss
    return F.cross_entropy(outputs, targets)


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dataset = TensorDataset(*data_of(case))
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, shuffle=case not in ("sorted_by_class", "one_batch_early")
    )
    torch.manual_seed(69)
    model = DDP(nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    drawn = torch.Generator().manual_seed(dist.get_rank())
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    for step, (inputs, labels) in enumerate(early(loader) if case == "one_batch_early" else loader):
        if case == "next_words":
            # The word after each one; the last has none.
            inputs = F.one_hot(labels, WIDTH).float().flatten(0, 1)
            labels = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        optimizer.zero_grad()
        loss_of(case, step, model(inputs), labels, drawn).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
