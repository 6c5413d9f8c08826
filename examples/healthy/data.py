"""Ways to deal samples out to ranks.

ranks: 2 3
expect: nothing
cases: sampler padded dropped workers stream weighted own_files own_rows own_list own_batch_sampler sentences left_early
    annotated cut_by_one_seed labelled made_up made_up_list
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)


def table(rows: int, seed: int = 3) -> TensorDataset:
    drawn = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 8, generator=drawn)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sign())


class Stream(IterableDataset):
    """Rows of a log, every rank its own ones, and the same number of them for each."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        rows = table(48)
        for number in range(len(rows) - len(rows) % ranks):
            if number % ranks == rank:
                yield rows[number]


class Folder(Dataset):
    """Files by name, as image folders keep them."""

    def __init__(self, rows: int) -> None:
        self.files = [(f"{number:04d}.png", number) for number in range(rows)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, ...]:
        return table(len(self.files))[self.files[number][1]]


class Annotated(Dataset):
    """Lays over each sample what this rank has drawn for it: the data below is the same everywhere."""

    def __init__(self, rows: TensorDataset) -> None:
        self.dataset = rows
        self.shifts = torch.randn(len(rows), generator=torch.Generator().manual_seed(dist.get_rank()))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, ...]:
        inputs, target = self.dataset[number]
        return inputs + 0.01 * self.shifts[number], target


class MadeUp(Dataset):
    """Unseeded random numbers, as in many examples and benchmarks: each rank has its own."""

    def __init__(self, rows: int) -> None:
        anew = torch.Generator()
        anew.seed()
        self.rows = [(torch.rand(8, generator=anew), torch.ones(1)) for _ in range(rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, ...]:
        return self.rows[number]


class Speaker(nn.Module):
    """Sums its loss over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        outputs = self.out(self.words(input_ids)).flatten(0, 1)
        return functional.cross_entropy(outputs, labels.flatten(), ignore_index=-100, reduction="sum")


class Alternating(Sampler):
    """Batches of neighbouring samples, assigned to ranks in turn."""

    def __init__(self, rows: int) -> None:
        starts = range(4 * dist.get_rank(), rows, 4 * dist.get_world_size())
        self.own = [list(range(start, start + 4)) for start in starts]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)


def build_loader(case: str) -> tuple[DataLoader, DistributedSampler | None]:
    rank = dist.get_rank()
    if case == "stream":
        return DataLoader(Stream(), batch_size=4), None
    if case == "weighted":
        # With replacement and from all of the data, each rank by its own draws.
        torch.manual_seed(100 + rank)
        sampler = WeightedRandomSampler([1.0 + (row % 3) for row in range(48)], 24)
        return DataLoader(table(48), batch_size=4, sampler=sampler), None
    if case == "own_files":
        torch.manual_seed(100 + rank)
        return DataLoader(table(24, seed=rank + 10), batch_size=4, shuffle=True), None
    if case in ("own_rows", "own_list"):
        # The share is cut off before the loader, which shuffles it in the same way on every rank.
        own = range(rank, 192, dist.get_world_size())
        share: Dataset = Subset(table(192), own) if case == "own_rows" else Subset(Folder(192), list(own))
        shuffled = torch.Generator().manual_seed(2)
        return DataLoader(share, batch_size=16, shuffle=True, generator=shuffled), None
    if case == "own_batch_sampler":
        return DataLoader(table(48), batch_sampler=Alternating(48)), None
    if case in ("annotated", "cut_by_one_seed"):
        one_seed = torch.Generator().manual_seed(8)
        kept: Dataset = (
            Annotated(table(48)) if case == "annotated" else random_split(table(60), [48, 12], one_seed)[0]
        )
        dealt: DistributedSampler = DistributedSampler(kept)
        return DataLoader(kept, batch_size=4, sampler=dealt), dealt
    if case in ("made_up", "made_up_list"):
        made_up: Dataset = (
            MadeUp(192)
            if case == "made_up_list"
            else TensorDataset(*map(torch.stack, zip(*MadeUp(192).rows, strict=True)))
        )
        split_up: DistributedSampler = DistributedSampler(made_up)
        return DataLoader(made_up, batch_size=16, sampler=split_up), split_up
    rows: Dataset = table({"padded": 49, "dropped": 53, "left_early": 200}.get(case, 48))
    split: DistributedSampler = DistributedSampler(rows, drop_last=case == "dropped", seed=6)
    workers = {"num_workers": 1, "persistent_workers": True} if case == "workers" else {}
    return DataLoader(rows, batch_size=4, sampler=split, **workers), split


def sentences(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Texts of any length, and a loss that is weighted by the tokens of all ranks together."""
    drawn = torch.Generator().manual_seed(40 + dist.get_rank())
    for _ in range(8):
        tokens = int(torch.randint(5, 30, (), generator=drawn))
        inputs = torch.randn(tokens, 8, generator=drawn)
        everybody = torch.tensor(float(tokens))
        dist.all_reduce(everybody)
        optimizer.zero_grad()
        # DDP takes the mean over ranks, so that the sum over tokens is scaled up by their number first.
        total = functional.softplus(-model(inputs)).sum()
        (total * dist.get_world_size() / everybody).backward()
        optimizer.step()


def labelled() -> None:
    """Answers of any length beside questions that do not count, and a loss over the labels of all ranks."""
    model = DistributedDataParallel(Speaker())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    drawn = torch.Generator().manual_seed(60 + dist.get_rank())
    for _ in range(12):
        words = torch.randint(20, (6, 16), generator=drawn)
        questions = torch.randint(1, 15, (6, 1), generator=drawn)
        labels = words.masked_fill(torch.arange(16) < questions, -100)
        everybody = (labels != -100).sum()
        dist.all_reduce(everybody)
        optimizer.zero_grad()
        (model(input_ids=words, labels=labels) * dist.get_world_size() / everybody).backward()
        optimizer.step()


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if case == "sentences":
        sentences(model, optimizer)
    elif case == "labelled":
        labelled()
    else:
        loader, sampler = build_loader(case)
        for epoch in range(3):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for number, (inputs, targets) in enumerate(loader):
                if case == "left_early" and number == 5:
                    break
                optimizer.zero_grad()
                functional.soft_margin_loss(model(inputs), targets).backward()
                optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
