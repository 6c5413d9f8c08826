"""Collects batches, data loaders and how the samples of each epoch were distributed over ranks."""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddpcheck.analysis.aggregate.agreement import PendingValues
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.analysis.data.batches import Batches, ModuleBatches
from ddpcheck.analysis.report import DataEpoch
from ddpcheck.records.kinds.data import BatchRecord, EpochRecord, LoaderRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt
    from ddpcheck.analysis.aggregate.step_window import Window

# Limit of an unpacked bitmap: ddpcheck writes none that is larger.
MOST_BYTES = 1 << 16
# Samplers of torch, accelerate, transformers and Lightning that draw every sample once.
KNOWN_SAMPLERS = {
    "BatchSampler",
    "BatchSamplerShard",
    "DistributedLengthGroupedSampler",
    "DistributedSampler",
    "DistributedSamplerWrapper",
    "LengthGroupedSampler",
    "RandomSampler",
    "SeedableRandomSampler",
    "SequentialSampler",
    "SkipBatchSampler",
}


@dataclass(frozen=True)
class LoaderPass:
    """One epoch of a loader on one rank."""

    loader: LoaderRecord
    epoch: EpochRecord

    @property
    def trained(self) -> bool:
        """Whether most of its batches were used for training, not for evaluation."""
        return self.epoch.fed > 0 and 2 * self.epoch.fed >= self.epoch.yielded


@dataclass(frozen=True)
class EpochSplit:
    """One epoch of one loader over all ranks. Counts are estimates for very large datasets."""

    loader: int
    epoch: int
    module: int
    step: int
    samples: int
    passes: Mapping[int, LoaderPass]
    exact: bool
    complete: bool
    # None: not known, for example because the epoch ended early.
    overlap: int | None
    missing: int | None
    padding: int | None

    @property
    def per_rank(self) -> dict[int, int]:
        return {rank: each.epoch.drawn for rank, each in sorted(self.passes.items())}

    @property
    def global_batch(self) -> int:
        """Samples of a step over all ranks: the upper limit of padding, and of samples dropped with the last batch."""
        return len(self.passes) * max(each.epoch.largest for each in self.passes.values())

    def one(self, fact: str) -> Any:
        """The value of a loader attribute if it is equal on all ranks; otherwise None."""
        values = {getattr(each.loader, fact) for each in self.passes.values()}
        return values.pop() if len(values) == 1 else None

    def known_sampler(self) -> bool:
        """Whether all samplers are known to draw every sample once; others may repeat samples on purpose."""
        return all(set(str(name).split(" of ")) <= KNOWN_SAMPLERS for name in self.facts("sampler").values())

    def regular(self) -> bool:
        """Whether all batches but the last have the same size, not batches by length."""
        epochs = [each.epoch for each in self.passes.values()]
        return all(epoch.drawn > (epoch.batches - 1) * epoch.largest for epoch in epochs)

    def facts(self, fact: str) -> dict[str, Any]:
        return {str(rank): getattr(each.loader, fact) for rank, each in sorted(self.passes.items())}

    def same_data(self, group: int) -> bool:
        """Whether an index identifies the same sample on all ranks.

        Each rank may have its own dataset. All have the same if their samplers distribute one dataset over the
        group, or if the attributes of the datasets are equal.
        """
        return not self.other_data(group) and (self.one("replicas") == group or bool(self.one("mark")))

    def other_data(self, group: int) -> bool:
        """Whether samplers distribute one dataset over all ranks, but the datasets differ."""
        if group < 2 or self.one("replicas") != group:
            return False
        loaders = [each.loader for each in self.passes.values()]
        if len({loader.length for loader in loaders}) > 1:
            return True
        columns = [loader.columns for loader in loaders]
        if not columns[0] or len({len(each) for each in columns}) > 1:
            return False
        # All columns must differ: a single one may be specific to the rank, or random.
        return all(len(set(column)) > 1 for column in zip(*columns, strict=True))


def split(passes: Mapping[int, LoaderPass]) -> EpochSplit:
    """Combine the passes of all ranks over one epoch."""
    first = passes[min(passes)]
    all_have_maps = all(each.epoch.map for each in passes.values())
    counts = _overlap(each.epoch.map for each in passes.values()) if all_have_maps else None
    complete = all(each.epoch.complete for each in passes.values())
    lengths = {each.loader.length for each in passes.values()}
    overlap = missing = padding = None
    stride = first.loader.stride
    if len(lengths) == 1 and counts is not None:
        overlap, distinct = counts
        marked = -(-first.loader.length // stride)
        missing = (marked - distinct) * stride if complete else None
        padding = max(0, sum(each.epoch.drawn for each in passes.values()) - first.loader.length)
        overlap *= stride
    return EpochSplit(
        loader=first.loader.loader,
        epoch=first.epoch.epoch,
        module=first.epoch.module,
        step=first.epoch.step,
        samples=max(lengths),
        # Drop the maps, which are large.
        passes={rank: LoaderPass(each.loader, replace(each.epoch, map="")) for rank, each in passes.items()},
        exact=stride == 1,
        complete=complete,
        overlap=overlap,
        missing=missing,
        padding=padding,
    )


def _overlap(maps: Iterable[str]) -> tuple[int, int] | None:
    """Number of samples that several ranks drew, and that any rank drew; None where a map is damaged."""
    once = twice = 0
    for text in maps:
        bits = unpack(text)
        if bits is None:
            return None
        twice |= once & bits
        once |= bits
    return twice.bit_count(), once.bit_count()


def unpack(text: str) -> int | None:
    """The bitmap of a record as an integer; None where it is missing or damaged."""
    if not text:
        return None
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), MOST_BYTES)
    except (binascii.Error, ValueError, zlib.error):
        return None
    return int.from_bytes(data, "little")


# Epochs whose distribution over ranks is kept. Later epochs are only checked for repeated order.
MOST_EPOCHS, FEWEST_EPOCHS = 200, 8
# Limit over all ranks: with thousands of ranks fewer epochs are kept.
_PASSES_OF_ALL_RANKS = 1 << 15
MOST_PENDING = 256

# Module, loader and epoch.
EpochKey = tuple[ModuleKey, int, int]


class RepeatedOrder:
    """The epochs of a loader that had the same order of samples as the epoch before."""

    def __init__(self) -> None:
        # The last pass by rank; by epoch, the ranks that repeated the order and those that could be compared.
        self._last: dict[int, LoaderPass] = {}
        self.same: dict[int, set[int]] = {}
        self.compared: dict[int, set[int]] = {}
        self.example: LoaderPass | None = None

    def add(self, rank: int, now: LoaderPass) -> None:
        before, self._last[rank] = self._last.get(rank), now
        if before is None or now.loader.iterable or not now.epoch.head or not before.epoch.head:
            return
        self.compared.setdefault(now.epoch.epoch, set()).add(rank)
        both = now.epoch.complete and before.epoch.complete
        same = now.epoch.order == before.epoch.order if both else now.epoch.head == before.epoch.head
        if same:
            self.same.setdefault(now.epoch.epoch, set()).add(rank)
            self.example = self.example or now


class DataCollector(Collector):
    """Batches, loaders and epochs of all ranks."""

    takes_windows = True

    def __init__(self, attempt: Attempt) -> None:
        self.batches = Batches()
        self.splits: dict[ModuleKey, list[EpochSplit]] = {}
        self.repeats: dict[tuple[ModuleKey, int], RepeatedOrder] = {}
        # Loaders by rank; and the modules that train on an IterableDataset.
        self._loaders: dict[tuple[int, int], LoaderRecord] = {}
        # By rank: length, number of parts and own part, for loaders whose sampler draws a part of the dataset.
        self._shares: dict[int, set[tuple[int, int, int]]] = {}
        self.iterable: set[ModuleKey] = set()
        self._pending: PendingValues[EpochKey, LoaderPass] = PendingValues()

    def add_window(self, window: Window) -> None:
        for stream in window.of(BatchRecord):
            self.batches.add_window(stream)

    @collects(LoaderRecord)
    def add_loader(self, rank: RankData, record: LoaderRecord) -> None:
        self._loaders[rank.number, record.loader] = record
        if record.replicas is not None and record.share is not None:
            self._shares.setdefault(rank.number, set()).add((record.length, record.replicas, record.share))

    def is_split(self, group: tuple[int, ...]) -> bool:
        """Whether samplers divide one dataset among these ranks."""
        splits = [
            {(length, replicas) for length, replicas, share in self._shares.get(rank, ()) if share == number}
            for number, rank in enumerate(group)
        ]
        return any(replicas == len(group) for _, replicas in set.intersection(*splits)) if splits else False

    @collects_per_module(BatchRecord)
    def add_batch(self, rank: RankData, module: ModuleKey, record: BatchRecord) -> None:
        self.batches.add(rank.number, module, record)

    @collects_per_module(EpochRecord)
    def add_epoch(self, rank: RankData, module: ModuleKey, record: EpochRecord) -> None:
        loader = self._loaders.get((rank.number, record.loader))
        if loader is None:
            return
        now = LoaderPass(loader, record)
        if not now.trained:
            return
        if loader.iterable:
            self.iterable.add(module)
            return
        self.repeats.setdefault((module, record.loader), RepeatedOrder()).add(rank.number, now)
        key = (module, record.loader, record.epoch)
        if len(self.splits.get(module, ())) >= _most_epochs(len(module[0])):
            return
        if self._pending.add(key, module[0], rank.number, now):
            self._finish(key)
        elif len(self._pending) > MOST_PENDING:
            self._finish(self._pending.oldest())

    def of(self, module: ModuleKey) -> ModuleBatches:
        return self.batches.modules.get(module, ModuleBatches())

    def end_rank(self, rank: RankData) -> None:
        self.batches.end_rank(rank.number)
        for key in self._pending.end_rank(rank.number):
            self._finish(key)

    def end(self, attempt: Attempt) -> None:
        self.batches.end_all()
        for key in sorted(self._pending):
            self._finish(key)

    def _finish(self, key: EpochKey) -> None:
        passes, module = self._pending.take(key), key[0]
        # Shares, overlaps and gaps are only known with the passes of all ranks.
        if set(passes) == set(module[0]):
            self.splits.setdefault(module, []).append(split(passes))


def _most_epochs(ranks: int) -> int:
    return max(FEWEST_EPOCHS, min(MOST_EPOCHS, _PASSES_OF_ALL_RANKS // max(1, ranks)))


MOST_ROWS = 50
MOST_RANKS = 64


def data_table(attempt: Attempt) -> tuple[DataEpoch, ...]:
    """The first epochs of each module's loaders, in the order of training."""
    listed = {*attempt.modules(), *attempt.sharded_roots()}
    rows = [
        _row(split, attempt.number(module))
        for module, splits in sorted(attempt.data.splits.items())
        for split in splits
        if module in listed
    ]
    return tuple(sorted(rows, key=lambda row: (row.step, row.module, row.loader, row.epoch))[:MOST_ROWS])


def _row(split: EpochSplit, module: str) -> DataEpoch:
    return DataEpoch(
        module=module,
        loader=split.loader,
        epoch=split.epoch,
        step=split.step,
        samples=split.samples,
        ranks=len(split.passes),
        per_rank={str(rank): drawn for rank, drawn in list(split.per_rank.items())[:MOST_RANKS]},
        overlap=split.overlap,
        missing=split.missing,
        padding=split.padding,
        complete=split.complete,
        exact=split.exact,
        sampler=str(split.one("sampler") or "several"),
    )


def split_row(split: EpochSplit) -> dict[str, Any]:
    """The row as evidence of a finding."""
    shares = split.per_rank
    return {
        "epoch": split.epoch,
        "samples": split.samples,
        "ranks": sorted(shares),
        "per_rank": {str(rank): drawn for rank, drawn in list(shares.items())[:MOST_RANKS]},
        "overlap": split.overlap,
        "missing": split.missing,
        "padding": split.padding,
        "sampler": split.one("sampler"),
    }
