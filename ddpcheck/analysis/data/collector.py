"""Collects batches, data loaders and how the samples of each epoch were distributed over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.agreement import PendingValues
from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.analysis.data.batches import Batches, ModuleBatches
from ddpcheck.analysis.data.split import EpochSplit, LoaderPass, split
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.records.kinds.data import BatchRecord, EpochRecord, LoaderRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

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

    def __init__(self, attempt: Attempt) -> None:
        self.batches = Batches()
        self.splits: dict[ModuleKey, list[EpochSplit]] = {}
        self.repeats: dict[tuple[ModuleKey, int], RepeatedOrder] = {}
        # Loaders by rank; and the modules that train on an IterableDataset.
        self._loaders: dict[tuple[int, int], LoaderRecord] = {}
        self.iterable: set[ModuleKey] = set()
        self._pending: PendingValues[EpochKey, LoaderPass] = PendingValues()

    @collects(LoaderRecord)
    def add_loader(self, rank: RankData, record: LoaderRecord) -> None:
        self._loaders[rank.number, record.loader] = record

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
