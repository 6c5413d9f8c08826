"""The data probe: its records of batches, loaders and random numbers, and that it changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from ddpcheck.analysis.data.collector import unpack
from ddpcheck.patches import Patches, around_next_index
from ddpcheck.probes.data import DataProbe, _columns, _dataset_digest
from ddpcheck.probes.probe import Probe
from ddpcheck.probes.samples.draws import MOST_MARKED, facts_of, stride_for
from ddpcheck.records.kinds.data import BatchRecord, EpochRecord, LoaderRecord
from ddpcheck.records.registry import to_line
from tests.helpers.fake_context import FakeContext, Job


class Training:
    """A model with the data probe alone and the real, patched data loader."""

    def __init__(self, dropout: float = 0.0, **config: Any) -> None:
        self.context = FakeContext(**config)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(dropout))
        self.job = Job(self.model, self.context, probes=[DataProbe])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.patches = Patches()
        dispatcher = self.job.dispatcher
        self.patches.replace(
            _BaseDataLoaderIter,
            "_next_index",
            lambda draw: around_next_index(draw, dispatcher.sample_drawn, dispatcher.sampler_exhausted),
        )

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.job.dispatcher.before_forward(self.model, *args, **kwargs)
        if args and isinstance(args[0], torch.Tensor):
            self.optimizer.zero_grad()
            self.model(args[0]).sum().backward()
        self.job.step(self.optimizer)

    def end(self) -> None:
        self.context.emit(Probe.before_exit)

    def batches(self) -> list[BatchRecord]:
        return self.context.of(BatchRecord)

    def epochs(self) -> list[EpochRecord]:
        return self.context.of(EpochRecord)


@pytest.fixture
def training() -> Iterator[Training]:
    yield from under_watch()


def under_watch(**options: Any) -> Iterator[Training]:
    made = Training(**options)
    yield made
    made.patches.remove()


def dataset(samples: int = 20) -> TensorDataset:
    return TensorDataset(torch.randn(samples, 4, generator=torch.Generator().manual_seed(0)))


def drawn(record: EpochRecord) -> set[int]:
    bits = unpack(record.map) or 0
    return {index for index in range(bits.bit_length()) if bits >> index & 1}


def test_each_forward_leaves_one_small_record(training: Training) -> None:
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        training.step(torch.randn(6, 4))
    first, second, third = training.batches()
    assert first.digest == third.digest != second.digest
    assert [record.forward for record in training.batches()] == [0, 1, 2]
    assert [record.rows for record in training.batches()] == [6, 6, 6]
    assert max(len(to_line(record)) for record in training.batches()) < 100


def test_the_step_is_written_if_it_is_not_the_forward(training: Training) -> None:
    training.job.dispatcher.before_forward(training.model, torch.randn(2, 4))
    training.step(torch.randn(2, 4))
    training.step(torch.randn(2, 4))
    assert [(record.forward, record.step) for record in training.batches()] == [(0, None), (1, 0), (2, 1)]


def test_every_so_manieth_forward() -> None:
    for made in under_watch(every=3):
        for _ in range(7):
            made.step(torch.randn(2, 4))
        assert [record.forward for record in made.batches()] == [0, 3, 6]


def test_evaluation_is_not_recorded(training: Training) -> None:
    training.model.eval()
    training.step(torch.randn(2, 4))
    training.end()
    assert training.batches() == []


def test_tokens_are_counted_by_their_labels(training: Training) -> None:
    labels = torch.tensor([[5, -100, -100], [5, 6, -100]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    training.step(input_ids=labels, labels=labels, attention_mask=mask)
    training.step({"labels": labels[:, 0], "x": mask})  # one label a sample
    training.step(labels=labels, num_items_in_batch=7)
    assert [(record.tokens, record.attended) for record in training.batches()] == [(3, 5), (0, 0), (0, 0)]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_draws_show_only_where_something_was_drawn(dropout: float) -> None:
    for made in under_watch(dropout=dropout):
        torch.manual_seed(3)
        for seed in (3, 3, 4):
            torch.rand(2)  # between steps: of no interest
            torch.manual_seed(seed)
            made.step(torch.ones(2, 4))
        first, second, third = [record.drew for record in made.batches()]
        assert first == second
        assert bool(first) == bool(dropout)
        assert (first != third) == bool(dropout)


@pytest.mark.parametrize("after_backward", [True, False])
def test_draws_after_the_backward_do_not_count(training: Training, after_backward: bool) -> None:
    """Noise on reduced gradients is the same on all ranks."""
    dispatcher, inputs = training.job.dispatcher, torch.ones(2, 4)
    dispatcher.before_forward(training.model, inputs)
    loss = training.model(inputs).sum()
    if not after_backward:
        torch.rand(3)
    dispatcher.backward_called(loss)
    loss.backward()
    torch.rand(3)
    training.job.step(training.optimizer)
    [record] = training.batches()
    assert bool(record.drew) is not after_backward


def test_draws_before_a_forward_have_a_digest_of_each_tensor() -> None:
    for made in under_watch():
        made.job.wrapped()
        for drawn in (True, False, True):
            x = torch.randn(8, 4) if drawn else torch.arange(32.0).view(8, 4)
            made.step(x, torch.arange(8))
        made.step(torch.randn(8, 4))  # one tensor is the whole batch
        made.end()
        recorded = [(bool(record.drew_before), len(record.parts)) for record in made.batches()]
        assert recorded == [(True, 2), (False, 0), (True, 2), (False, 0)]


def test_numbers_drawn_by_the_step_are_not_drawn_before_the_next_forward(training: Training) -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            torch.rand(3)
            return super().step(closure)

    training.optimizer = Noisy(training.model.parameters(), lr=0.1)
    for n in range(3):
        training.step(torch.arange(32.0).view(8, 4) + n, torch.arange(8))
    training.end()
    assert [record.drew_before for record in training.batches()] == [""] * 3


def test_the_generator_is_left_as_it_was(training: Training) -> None:
    """Shuffling and dropout give the same numbers with and without the probe."""

    def train(step: Any) -> list[Any]:
        torch.manual_seed(8)
        seen = []
        for (batch,) in DataLoader(dataset(), batch_size=4, shuffle=True):
            step(batch)
            seen.append(batch.clone())
        return [*seen, torch.rand(3)]

    tracked = train(training.step)
    training.patches.remove()
    alone = train(lambda batch: None)
    assert all(torch.equal(one, other) for one, other in zip(tracked, alone, strict=True))


def test_an_epoch_and_its_samples(training: Training) -> None:
    data = dataset()
    sampler: Any = DistributedSampler(data, 2, 1, shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            training.step(batch)
    training.end()
    [described] = training.context.of(LoaderRecord)
    assert (described.length, described.sampler, described.shuffle) == (20, "DistributedSampler", False)
    assert (described.replicas, described.share, described.seed) == (2, 1, 0)
    assert described.mark
    first, second = training.epochs()
    assert drawn(first) == set(range(1, 20, 2))
    assert (first.drawn, first.batches, first.largest, first.complete) == (10, 3, 4, True)
    assert (first.fed, first.yielded) == (3, 3)
    assert (first.order, first.head) == (second.order, second.head)
    assert (first.epoch, first.at, second.epoch, second.at) == (0, 0, 1, 1)
    assert (first.step, second.step) == (0, 3)


class Folder(Dataset[torch.Tensor]):
    """Has more values than the digest reads."""

    def __init__(self) -> None:
        self.files = [f"{number}.png" for number in range(200)]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((4,), float(number))


@pytest.mark.parametrize("whole", [Folder(), dataset(200)], ids=["list", "tensor"])
@pytest.mark.parametrize("as_list", [False, True])
def test_subsets_of_one_dataset_have_different_digests(whole: Any, as_list: bool) -> None:
    def mark(*indices: int) -> str:
        numbers = range(*indices)
        share: Any = Subset(whole, list(numbers) if as_list else numbers)
        return _dataset_digest(iter(DataLoader(share, batch_size=2)))

    assert mark(0, 200, 2) == mark(0, 200, 2) != ""
    assert mark(0, 200, 2) != mark(1, 200, 2)


class Images(Dataset[Any]):
    """A path and a class for each sample, and a separate list of the classes."""

    def __init__(self, count: int) -> None:
        self.samples = [(f"{number}.png", number % 3) for number in range(count)]
        self.targets = [target for _, target in self.samples]

    def __len__(self) -> int:
        return len(self.samples)


class Noted(Dataset[Any]):
    """Wraps another dataset and has its own attributes, one of them per sample."""

    def __init__(self, whole: Any) -> None:
        self.dataset, self.notes, self.few = whole, torch.rand(len(whole)), [1, 2, 3]

    def __len__(self) -> int:
        return len(self.dataset)


@pytest.mark.parametrize(
    ("data", "columns"),
    [
        (Folder(), 1),
        (Subset(dataset(200), range(100)), 1),
        (Subset(dataset(200), list(range(0, 200, 2))), 1),
        (Subset(dataset(200), torch.randperm(200)), 1),  # type: ignore[arg-type]
        (Subset(dataset(200), range(4)), 0),
        (Images(200), 1),
        # Values, which each rank may have made up for itself, and labels.
        (dataset(200), 0),
        (Noted(dataset(200)), 0),
        (TensorDataset(torch.arange(200) % 50), 0),
        ([1, 2, 3], 0),
    ],
)
def test_columns_name_each_sample(data: Any, columns: int) -> None:
    digests, members = _columns(data, len(data))
    assert len(digests) == len(members) == columns
    assert (digests, members) == _columns(data, len(data))


def test_columns_distinguish_subsets() -> None:
    shares = [_columns(Subset(dataset(200), range(rank, 200, 2)), 100) for rank in range(2)]
    assert shares[0] != shares[1]


def test_the_members_of_a_column_do_not_depend_on_their_order() -> None:
    class Files:
        def __init__(self, files: list[str]) -> None:
            self.files = files

    files = [f"{number}.png" for number in range(50)]
    (one, members), (other, same_members) = (_columns(Files(each), 50) for each in (files, files[::-1]))
    assert one != other
    assert members == same_members
    assert members != _columns(Files([*files[1:], "50.png"]), 50)[1]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_left_early_is_not_complete(training: Training, workers: int) -> None:
    for _ in range(2):
        for number, (batch,) in enumerate(DataLoader(dataset(40), batch_size=2, num_workers=workers)):
            training.step(batch)
            if number == 2:
                break
    training.end()
    assert [(record.complete, record.fed, record.yielded) for record in training.epochs()] == [
        (False, 3, 3)
    ] * 2
    assert all(record.head for record in training.epochs()) == bool(workers)


def test_workers_draw_ahead_and_persist(training: Training) -> None:
    loader = DataLoader(dataset(), batch_size=4, num_workers=1, persistent_workers=True, shuffle=True)
    for _ in range(2):
        for (batch,) in loader:
            training.step(batch)
    training.end()
    first, second = training.epochs()
    assert drawn(first) == drawn(second) == set(range(20))
    assert first.order != second.order
    assert (first.complete, second.complete) == (True, True)


def test_a_loader_without_training_writes_nothing(training: Training) -> None:
    for (batch,) in DataLoader(dataset(), batch_size=4):
        training.step(batch)
        for _ in DataLoader(dataset(3), batch_size=3):
            pass
    training.end()
    assert {record.loader for record in training.epochs()} == {0}
    assert [record.length for record in training.context.of(LoaderRecord)] == [20]


def test_a_loader_made_anew_is_the_same_loader(training: Training) -> None:
    data = dataset()
    for _ in range(3):
        for (batch,) in DataLoader(data, batch_size=10, shuffle=True):
            training.step(batch)
    training.end()
    assert [(record.loader, record.epoch) for record in training.epochs()] == [(0, 0), (0, 1), (0, 2)]


def test_indices_that_are_no_numbers_are_counted(training: Training) -> None:
    class Named(dict[str, torch.Tensor]):
        pass

    named = Named({name: torch.randn(4) for name in "abcdef"})
    loader: Any = DataLoader(named, batch_sampler=BatchSampler(list(named), 2, False))  # type: ignore[arg-type]
    for batch in loader:
        training.step(batch)
    training.end()
    [record] = training.epochs()
    assert (record.drawn, record.map, record.order) == (6, "", "")


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.randn(8, 4)


def test_a_stream_has_no_indices(training: Training) -> None:
    for batch in DataLoader(Stream(), batch_size=2):
        training.step(batch)
    training.end()
    [described] = training.context.of(LoaderRecord)
    assert (described.iterable, described.length, described.mark) == (True, -1, "")
    assert [record.map for record in training.epochs()] == [""]


def test_attributes_of_nested_samplers() -> None:
    inner: Any = DistributedSampler(dataset(), 4, 3, seed=9)

    class Shard:
        def __init__(self) -> None:
            self.batch_sampler = BatchSampler(inner, 2, False)
            self.num_processes, self.process_index = 2, 1

    facts = facts_of(Shard())
    assert facts["names"] == "Shard of DistributedSampler"
    assert (facts["replicas"], facts["share"], facts["seed"], facts["shuffle"]) == (2, 1, 9, True)
    assert facts_of(BatchSampler(RandomSampler(range(4), replacement=True), 2, False))["replacement"] is True


def test_reading_a_sampler_calls_no_user_code() -> None:
    class Touchy:
        @property
        def seed(self) -> int:
            raise RuntimeError("looked at")

    assert facts_of(Touchy())["names"] == "Touchy"


@pytest.mark.parametrize(
    ("length", "ranks"), [(0, 2), (MOST_MARKED, 4), (100_000, 7), (1_000_000, 61), (10**8, 8)]
)
def test_the_stride_keeps_maps_small_and_ranks_mixed(length: int, ranks: int) -> None:
    stride = stride_for(length, ranks)
    assert -(-length // stride) <= MOST_MARKED
    followed = range(0, min(length, stride * ranks * 3), stride)
    assert not followed or stride == 1 or {number % ranks for number in followed} == set(range(ranks))


def test_an_iterator_is_not_kept_alive(training: Training) -> None:
    import gc
    import weakref

    data = dataset()
    gone = weakref.ref(data)
    for (batch,) in DataLoader(data, batch_size=4):
        training.step(batch)
    del data
    gc.collect()
    assert gone() is None
