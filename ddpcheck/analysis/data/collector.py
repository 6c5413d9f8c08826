"""All that is known of an attempt's data: its batches, its loaders and how each epoch was dealt out."""

from __future__ import annotations

from ddpcheck.analysis.aggregate.pending import PendingValues
from ddpcheck.analysis.data.batches import Batches, ModuleBatches
from ddpcheck.analysis.data.split import EpochSplit, Pass, split
from ddpcheck.analysis.module_key import ModuleKey, members
from ddpcheck.records.schema import BatchRecord, EpochRecord, LoaderRecord

# Epochs that are kept with what each rank said; of later ones only those that repeat an order count.
MOST_EPOCHS, FEWEST_EPOCHS = 200, 8
# Of all ranks together, more or less: with thousands of ranks fewer epochs are kept.
_PASSES_OF_ALL = 1 << 15
MOST_PENDING = 256

Place = tuple[ModuleKey, int, int]


class RepeatedOrder:
    """Which epochs of a loader came in the order of the epoch before."""

    def __init__(self) -> None:
        # By rank, the last pass; and by epoch, the ranks that repeated and those that could be compared.
        self._last: dict[int, Pass] = {}
        self.same: dict[int, set[int]] = {}
        self.compared: dict[int, set[int]] = {}
        self.example: Pass | None = None

    def add(self, rank: int, now: Pass) -> None:
        before, self._last[rank] = self._last.get(rank), now
        if before is None or now.loader.iterable or not now.epoch.head or not before.epoch.head:
            return
        self.compared.setdefault(now.epoch.epoch, set()).add(rank)
        both = now.epoch.complete and before.epoch.complete
        same = now.epoch.order == before.epoch.order if both else now.epoch.head == before.epoch.head
        if same:
            self.same.setdefault(now.epoch.epoch, set()).add(rank)
            self.example = self.example or now


class DataCollector:
    """Fed record by record."""

    def __init__(self) -> None:
        self.batches = Batches()
        self.splits: dict[ModuleKey, list[EpochSplit]] = {}
        self.repeats: dict[tuple[ModuleKey, int], RepeatedOrder] = {}
        # Per rank, its loaders; and whether an IterableDataset fed a module.
        self._loaders: dict[tuple[int, int], LoaderRecord] = {}
        self.iterable: set[ModuleKey] = set()
        self._pending: PendingValues[Place, Pass] = PendingValues()

    def loader(self, rank: int, record: LoaderRecord) -> None:
        self._loaders[rank, record.loader] = record

    def batch(self, rank: int, module: ModuleKey, record: BatchRecord) -> None:
        self.batches.add(rank, module, record)

    def epoch(self, rank: int, module: ModuleKey, record: EpochRecord) -> None:
        loader = self._loaders.get((rank, record.loader))
        if loader is None:
            return
        now = Pass(loader, record)
        if not now.trained:
            return
        if loader.iterable:
            self.iterable.add(module)
            return
        self.repeats.setdefault((module, record.loader), RepeatedOrder()).add(rank, now)
        place = (module, record.loader, record.epoch)
        if len(self.splits.get(module, ())) >= _most_epochs(len(module[0])):
            return
        if self._pending.hear(place, members(module), rank, now):
            self._finish(place)
        elif len(self._pending) > MOST_PENDING:
            self._finish(self._pending.oldest())

    def of(self, module: ModuleKey) -> ModuleBatches:
        return self.batches.modules.get(module, ModuleBatches())

    def end_rank(self, rank: int) -> None:
        self.batches.end_rank(rank)
        for place in self._pending.leave(rank):
            self._finish(place)

    def end_all(self) -> None:
        self.batches.end_all()
        for place in sorted(self._pending):
            self._finish(place)

    def _finish(self, place: Place) -> None:
        passes = self._pending.take(place)
        # With a rank missing nothing can be said of shares, overlap or gaps.
        if set(passes) == set(place[0][0]):
            self.splits.setdefault(place[0], []).append(split(passes))


def _most_epochs(ranks: int) -> int:
    return max(FEWEST_EPOCHS, min(MOST_EPOCHS, _PASSES_OF_ALL // max(1, ranks)))
