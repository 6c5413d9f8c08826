"""Small jobs about data and random numbers on forked ranks: mistakes to find, and healthy jobs.

python data_cases.py --cases no_sampler,healthy_plain --world-size 2
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import forking
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

WIDTH = 8
SAMPLES = 48

Case = Callable[[int, int], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def data(samples: int = SAMPLES, seed: int = 3) -> TensorDataset:
    return TensorDataset(torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed)))


class Trainer:
    """A model and its optimizer; dropout on request."""

    def __init__(self, dropout: float = 0.0) -> None:
        torch.manual_seed(5)
        parts = [nn.Linear(WIDTH, 6), nn.Dropout(dropout) if dropout else nn.Tanh(), nn.Linear(6, 1)]
        self.ddp = DDP(nn.Sequential(*parts))
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        forking.keep(self)

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.ddp(batch).square().mean().backward()
        self.optimizer.step()

    def epochs(self, loader: Any, count: int = 2, sampler: Any = None, most: int = 1000) -> None:
        for epoch in range(count):
            if sampler is not None:
                sampler.set_epoch(epoch)
            for number, (batch,) in enumerate(loader):
                self.step(batch)
                if number + 1 == most:
                    break


# ---- mistakes


@case
def no_sampler(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    Trainer().epochs(DataLoader(data(), batch_size=4, shuffle=True))


@case
def sequential_everywhere(rank: int, world_size: int) -> None:
    Trainer().epochs(DataLoader(data(), batch_size=4))


@case
def seed_differs(rank: int, world_size: int) -> None:
    dataset = data()
    sampler: Any = DistributedSampler(dataset, world_size, rank, seed=rank)
    Trainer().epochs(DataLoader(dataset, batch_size=4, sampler=sampler), sampler=sampler)


@case
def seed_differs_and_left_early(rank: int, world_size: int) -> None:
    dataset = data(400)
    sampler: Any = DistributedSampler(dataset, world_size, rank, seed=rank)
    Trainer().epochs(DataLoader(dataset, batch_size=10, sampler=sampler), sampler=sampler, most=12)


@case
def shuffled_alone(rank: int, world_size: int) -> None:
    """Every rank shuffles the whole dataset, each with a seed of its own."""
    trainer = Trainer()
    torch.manual_seed(rank)
    trainer.epochs(DataLoader(data(), batch_size=4, shuffle=True))


@case
def all_are_rank_0(rank: int, world_size: int) -> None:
    dataset = data()
    sampler: Any = DistributedSampler(dataset, world_size, 0)
    Trainer().epochs(DataLoader(dataset, batch_size=4, sampler=sampler), sampler=sampler)


@case
def all_are_alone(rank: int, world_size: int) -> None:
    dataset = data()
    sampler: Any = DistributedSampler(dataset, 1, 0)
    Trainer().epochs(DataLoader(dataset, batch_size=4, sampler=sampler), sampler=sampler)


class Stream(IterableDataset[tuple[torch.Tensor]]):
    """A stream; each rank takes its share if `world_size` is given."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        for number, sample in enumerate(data()):
            if number % self.world_size == self.rank:
                yield sample


@case
def stream_unsplit(rank: int, world_size: int) -> None:
    Trainer().epochs(DataLoader(Stream(), batch_size=4))


@case
def epoch_not_set(rank: int, world_size: int) -> None:
    dataset = data()
    sampler: Any = DistributedSampler(dataset, world_size, rank)
    Trainer().epochs(DataLoader(dataset, batch_size=4, sampler=sampler), 3)


@case
def epoch_not_set_and_left_early(rank: int, world_size: int) -> None:
    dataset = data(400)
    sampler: Any = DistributedSampler(dataset, world_size, rank)
    Trainer().epochs(DataLoader(dataset, batch_size=10, sampler=sampler, num_workers=1), 2, most=3)


@case
def same_dropout(rank: int, world_size: int) -> None:
    trainer = Trainer(dropout=0.4)
    dataset = data()
    sampler: Any = DistributedSampler(dataset, world_size, rank)
    trainer.epochs(DataLoader(dataset, batch_size=4, sampler=sampler), sampler=sampler)


@case
def same_noise(rank: int, world_size: int) -> None:
    """Noise for the loss, drawn after the forward pass."""
    trainer = Trainer()
    torch.manual_seed(9)
    for batch in batches(rank):
        trainer.optimizer.zero_grad()
        out = trainer.ddp(batch)
        (out + torch.randn_like(out)).square().mean().backward()
        trainer.optimizer.step()


@case
def uneven_last_batch(rank: int, world_size: int) -> None:
    """The last batch has another size on each rank; the number of batches is the same."""
    dataset = data(4 * world_size * 3 + 3 * world_size - 2)
    own = list(range(rank, len(dataset), world_size))
    loader = DataLoader(
        torch.utils.data.Subset(dataset, own[: 15 - 2 * (rank == world_size - 1)]), batch_size=4
    )
    Trainer().epochs(loader, 2)


class Tagger(nn.Module):
    """Takes labels and returns its loss, a mean over the tokens of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = nn.functional.cross_entropy(
            self.out(self.words(input_ids)).flatten(0, 1), labels.flatten(), reduction=reduction
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def texts(rank: int, steps: int = 6) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(40 + rank)
    for step in range(steps):
        words = torch.randint(50, (4, 12), generator=generator)
        labels = words.clone()
        labels[:, 3 + (5 * rank + step) % 9 :] = -100
        yield words, labels


def tag(rank: int, world_size: int, shared: bool) -> None:
    torch.manual_seed(5)
    ddp = DDP(Tagger())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    forking.keep(ddp, optimizer)
    for words, labels in texts(rank):
        optimizer.zero_grad()
        count = (labels != -100).sum()
        dist.all_reduce(count)
        more = {"num_items_in_batch": count / world_size} if shared else {}
        ddp(input_ids=words, labels=labels, **more).backward()
        optimizer.step()


@case
def token_means(rank: int, world_size: int) -> None:
    tag(rank, world_size, shared=False)


@case
def constant_input(rank: int, world_size: int) -> None:
    """One constant batch, as in a benchmark: not a mistake, but worth a note."""
    trainer = Trainer()
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(5):
        trainer.step(batch)


# ---- healthy jobs


def batches(rank: int, steps: int = 6) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        yield torch.randn(4, WIDTH, generator=generator)


def distributed(rank: int, world_size: int, samples: int = SAMPLES, epochs: int = 3, **options: Any) -> None:
    dataset = data(samples)
    of_sampler = {name: options.pop(name) for name in ("shuffle", "drop_last") if name in options}
    if "loader_drop_last" in options:
        options["drop_last"] = options.pop("loader_drop_last")
    most = options.pop("most", 1000)
    sampler: Any = DistributedSampler(dataset, world_size, rank, **of_sampler)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, **options)
    Trainer().epochs(loader, epochs, sampler, most)


@case
def healthy_plain(rank: int, world_size: int) -> None:
    distributed(rank, world_size)


@case
def healthy_sequential(rank: int, world_size: int) -> None:
    """No shuffling: every epoch has the same order on purpose."""
    distributed(rank, world_size, shuffle=False)


@case
def healthy_padding(rank: int, world_size: int) -> None:
    distributed(rank, world_size, samples=SAMPLES + 1)


@case
def healthy_drop_last(rank: int, world_size: int) -> None:
    distributed(rank, world_size, samples=SAMPLES + 1, drop_last=True)


@case
def healthy_loader_drop_last(rank: int, world_size: int) -> None:
    distributed(rank, world_size, samples=SAMPLES + 5, loader_drop_last=True)


@case
def healthy_workers(rank: int, world_size: int) -> None:
    distributed(rank, world_size, num_workers=2, samples=SAMPLES + 1)


@case
def healthy_persistent_workers(rank: int, world_size: int) -> None:
    distributed(rank, world_size, num_workers=1, persistent_workers=True)


@case
def healthy_left_early(rank: int, world_size: int) -> None:
    distributed(rank, world_size, samples=200, most=3)


@case
def healthy_left_early_with_workers(rank: int, world_size: int) -> None:
    distributed(rank, world_size, samples=200, most=3, num_workers=1, persistent_workers=True)


@case
def healthy_large(rank: int, world_size: int) -> None:
    """Too many samples to record a map of all of them."""
    dataset = TensorDataset(torch.arange(40_000.0)[:, None].expand(-1, WIDTH) / 1000)
    sampler: Any = DistributedSampler(dataset, world_size, rank)
    Trainer().epochs(DataLoader(dataset, batch_size=1000, sampler=sampler), 2, sampler)


@case
def healthy_evaluation(rank: int, world_size: int) -> None:
    """Every rank evaluates on all of the same data, in the middle of an epoch and between epochs."""
    dataset, held_out = data(), data(8, seed=4)
    sampler: Any = DistributedSampler(dataset, world_size, rank)
    loader, tests = DataLoader(dataset, batch_size=4, sampler=sampler), DataLoader(held_out, batch_size=8)
    trainer = Trainer()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for number, (batch,) in enumerate(loader):
            trainer.step(batch)
            if number == 1:
                evaluate(trainer.ddp, tests, gradients=False)
        evaluate(trainer.ddp, tests, gradients=epoch > 0)


def evaluate(ddp: nn.Module, loader: Any, gradients: bool) -> None:
    ddp.eval()
    with torch.set_grad_enabled(gradients):
        for (batch,) in loader:
            ddp(batch)
    ddp.train()


@case
def healthy_evaluation_with_workers(rank: int, world_size: int) -> None:
    """One batch of evaluation, right before the next one of training."""
    dataset, held_out = data(), data(8, seed=4)
    sampler: Any = DistributedSampler(dataset, world_size, rank)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1)
    tests = DataLoader(held_out, batch_size=8, num_workers=1, shuffle=True)
    trainer = Trainer()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            trainer.step(batch)
        evaluate(trainer.ddp, tests, gradients=False)


class Blocks(Sampler[list[int]]):
    """A custom batch sampler: ranks take blocks in turn."""

    def __init__(self, samples: int, rank: int, world_size: int) -> None:
        self.own = [list(range(at, at + 4)) for at in range(4 * rank, samples, 4 * world_size)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)


@case
def healthy_batch_sampler(rank: int, world_size: int) -> None:
    dataset = data()
    Trainer().epochs(DataLoader(dataset, batch_sampler=Blocks(SAMPLES, rank, world_size)))
    sampler: Any = DistributedSampler(dataset, world_size, rank)
    Trainer().epochs(DataLoader(dataset, batch_sampler=BatchSampler(sampler, 4, False)), 2, sampler)


@case
def healthy_own_shard(rank: int, world_size: int) -> None:
    """Every rank has a dataset of its own; the indices are equal on all ranks."""
    trainer = Trainer()
    torch.manual_seed(rank)
    trainer.epochs(DataLoader(data(24, seed=rank), batch_size=4, shuffle=True))
    trainer.epochs(DataLoader(data(24, seed=10 + rank), batch_size=4))


@case
def healthy_weighted(rank: int, world_size: int) -> None:
    """With replacement: each rank draws from the whole dataset independently."""
    trainer = Trainer()
    torch.manual_seed(rank)
    weights = WeightedRandomSampler([1.0] * SAMPLES, 24)
    trainer.epochs(DataLoader(data(), batch_size=4, sampler=weights))


class Unindexed(Dataset[tuple[torch.Tensor]]):
    """Generates random samples: an index says nothing about the data."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.randn(WIDTH),)


@case
def healthy_generated(rank: int, world_size: int) -> None:
    trainer = Trainer()
    torch.manual_seed(rank)
    trainer.epochs(DataLoader(Unindexed(), batch_size=4, sampler=RandomSampler(range(24))))
    trainer.epochs(DataLoader(Unindexed(), batch_size=4, sampler=SequentialSampler(range(24))))


@case
def healthy_stream(rank: int, world_size: int) -> None:
    Trainer().epochs(DataLoader(Stream(rank, world_size), batch_size=4))


@case
def healthy_dropout(rank: int, world_size: int) -> None:
    trainer = Trainer(dropout=0.4)
    torch.manual_seed(5 + rank)
    dataset = data()
    sampler: Any = DistributedSampler(dataset, world_size, rank)
    trainer.epochs(DataLoader(dataset, batch_size=4, sampler=sampler), sampler=sampler)


@case
def healthy_common_seed(rank: int, world_size: int) -> None:
    """One seed on all ranks, but nothing random in the model: draws between steps do not count."""
    trainer = Trainer()
    for batch in batches(rank):
        torch.rand(3)
        trainer.step(batch)
    distributed(rank, world_size)


@case
def healthy_tokens_shared(rank: int, world_size: int) -> None:
    tag(rank, world_size, shared=True)


@case
def healthy_placeholders(rank: int, world_size: int) -> None:
    """Zeros, None and scalars as inputs: nothing that could be compared."""

    class Free(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, *given: Any, **named: Any) -> torch.Tensor:
            return self.weight.square().sum()

    ddp = DDP(Free())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    forking.keep(ddp, optimizer)
    for step in range(8):
        optimizer.zero_grad()
        given: list[tuple[Any, ...]] = [(torch.zeros(4, WIDTH),), (None,), (), (step,), (torch.zeros(0, 3),)]
        (ddp(*given[step % 5]) * (1 + rank + 0.1 * step)).backward()
        optimizer.step()


@case
def healthy_lengths(rank: int, world_size: int) -> None:
    """The first dimension is time, and texts have any length."""
    trainer = Trainer()
    for batch in batches(rank, 8):
        trainer.step(batch.repeat(9, 1)[: 5 + (7 * rank + 5 + int(batch.abs().sum())) % 20])


@case
def healthy_join(rank: int, world_size: int) -> None:
    trainer = Trainer()
    with trainer.ddp.join():
        for number, batch in enumerate(batches(rank, 3 + rank)):
            trainer.step(batch[: 1 + (number + rank) % 4])


@case
def healthy_accelerate(rank: int, world_size: int) -> None:
    """accelerate splits the data itself and repeats samples to fill the last batch."""
    # accelerate reads these variables although the process group exists.
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29999",
        ACCELERATE_USE_CPU="true",
    )
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(5)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader, tests = (
        DataLoader(data(45), batch_size=4, shuffle=True),
        DataLoader(data(8, seed=4), batch_size=4),
    )
    model, optimizer, loader, tests = accelerator.prepare(model, optimizer, loader, tests)
    forking.keep(model, optimizer)
    for _ in range(3):
        for (batch,) in loader:
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
        with torch.no_grad():
            for (batch,) in tests:
                model(batch)


# ---- forking


def rank_main(rank: int, name: str, world_size: int) -> None:
    store = os.environ["JOB_STORE"]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    CASES[name](rank, world_size)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", required=True, help="names, separated by commas")
    parser.add_argument("--world-size", type=int, default=2)
    options = parser.parse_args()
    names, size = options.cases.split(","), options.world_size
    if "healthy_accelerate" in names:
        import accelerate  # noqa: F401  # slow to import: once here instead of once in each rank
    forking.prepare()
    failed = [name for name in names if not forking.run_ranks(rank_main, size, name, size).ok]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
