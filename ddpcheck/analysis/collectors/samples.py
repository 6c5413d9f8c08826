"""Collects fingerprints of samples by index, and compares them across ranks and epochs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.records.kinds.data import LabelsRecord, LoaderRecord, SamplesRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

_DIGITS = 8
# Visits of one index that are kept, and loaders of one module.
MOST_VISITS = 64
MOST_LOADERS = 16
# Pairs of visits that a statement needs.
FEWEST = 3


@dataclass(frozen=True)
class Visit:
    """One use of a sample: the digest of each of its parts."""

    rank: int
    epoch: int
    # The first step of the pass.
    step: int
    parts: tuple[str, ...]


@dataclass
class PartStats:
    """One part of the samples, such as the label: is it the same each time?"""

    kind: str
    # Pairs of visits by the same rank, and by different ranks, in which the part was the same or not.
    own_equal: int = 0
    own_differ: int = 0
    cross_equal: int = 0
    cross_differ: int = 0
    values: set[str] = field(default_factory=set)

    @property
    def is_label(self) -> bool:
        return self.kind == "i"

    @property
    def stable(self) -> bool:
        """Whether a rank always sees the same: no random augmentation."""
        return self.own_equal >= FEWEST and not self.own_differ


class LoaderSamples:
    """The followed samples of one loader, by index."""

    def __init__(self, kinds: str) -> None:
        self.kinds = kinds
        self.visits: dict[int, list[Visit]] = {}

    def add(self, rank: int, record: SamplesRecord) -> None:
        width = _DIGITS * len(self.kinds)
        for index, digest in zip(record.indices, record.digests, strict=False):
            if len(digest) == width:
                parts = tuple(digest[at : at + _DIGITS] for at in range(0, width, _DIGITS))
                visits = self.visits.setdefault(index, [])
                if len(visits) < MOST_VISITS:
                    visits.append(Visit(rank, record.epoch, record.step, parts))

    def pairs(self, cross: bool) -> Iterator[tuple[int, Visit, Visit]]:
        """Index and two visits of it, by different ranks or by one rank in two epochs."""
        for index, visits in self.visits.items():
            for one, other in combinations(visits, 2):
                if (one.rank != other.rank) == cross and (cross or one.epoch != other.epoch):
                    yield index, one, other

    def stats(self) -> list[PartStats]:
        stats = [PartStats(kind) for kind in self.kinds]
        for cross in (False, True):
            for _, one, other in self.pairs(cross):
                for part, mine, theirs in zip(stats, one.parts, other.parts, strict=True):
                    if cross:
                        part.cross_equal += mine == theirs
                        part.cross_differ += mine != theirs
                    else:
                        part.own_equal += mine == theirs
                        part.own_differ += mine != theirs
        for visits in self.visits.values():
            for visit in visits:
                for part, mine in zip(stats, visit.parts, strict=True):
                    part.values.add(mine)
        return stats

    def differing(self, part: int) -> list[tuple[int, Visit, Visit]]:
        return [pair for pair in self.pairs(True) if pair[1].parts[part] != pair[2].parts[part]]

    def first_step(self) -> int:
        return min((visit.step for visits in self.visits.values() for visit in visits), default=0)

    def outliers(self, part: int) -> tuple[int, ...]:
        """The ranks that differ from the largest group of ranks that agree; all ranks if there is no such group."""
        differ = {frozenset((one.rank, other.rank)) for _, one, other in self.differing(part)}
        return outliers_of(
            sorted({visit.rank for visits in self.visits.values() for visit in visits}), differ
        )

    def moved(self, part: int) -> int:
        """How many contents different ranks have under different indices, and not under the same."""
        by_content: dict[str, set[tuple[int, int]]] = {}
        contents: Counter[tuple[int, str]] = Counter()
        for index, visits in self.visits.items():
            for rank, digest in {(visit.rank, visit.parts[part]) for visit in visits}:
                by_content.setdefault(digest, set()).add((rank, index))
                contents[rank, digest] += 1
        return sum(
            len({rank for rank, _ in uses}) > 1
            and len({index for _, index in uses}) > 1
            # The same content under two indices of one rank is a sample that exists twice.
            and all(contents[rank, digest] == 1 for rank, _ in uses)
            for digest, uses in by_content.items()
        )


@dataclass(frozen=True)
class LabelDifference:
    """Labels of one loader that ranks map to different classes, between the loader and the loss."""

    step: int
    outliers: tuple[int, ...]
    # By label, the class of each rank.
    classes: Mapping[str, Mapping[int, int]]


def outliers_of(ranks: Sequence[int], differ: Set[frozenset[int]]) -> tuple[int, ...]:
    """The ranks that differ from the largest group of ranks that agree; all ranks if there is no such group."""
    groups: list[list[int]] = []
    for rank in ranks:
        for group in groups:
            if not any(frozenset((rank, member)) in differ for member in group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    largest = max(groups, key=len, default=[])
    if 2 * len(largest) <= len(ranks):
        return tuple(ranks)
    return tuple(rank for rank in ranks if rank not in largest)


class SampleCollector(Collector):
    """Samples by module and loader, and the loaders of all ranks."""

    def __init__(self, attempt: Attempt) -> None:
        # By module and loader, for each column and term: by rank, what is known last.
        self._labels: dict[tuple[ModuleKey, int], dict[tuple[int, int, int], dict[int, LabelsRecord]]] = {}
        self.samples: dict[ModuleKey, dict[int, LoaderSamples]] = {}
        # By loader and rank.
        self._loaders: dict[int, dict[int, LoaderRecord]] = {}

    @collects(LoaderRecord)
    def add_loader(self, rank: RankData, record: LoaderRecord) -> None:
        self._loaders.setdefault(record.loader, {})[rank.number] = record

    @collects_per_module(SamplesRecord)
    def add_samples(self, rank: RankData, module: ModuleKey, record: SamplesRecord) -> None:
        loaders = self.samples.setdefault(module, {})
        if record.loader not in loaders and len(loaders) >= MOST_LOADERS:
            return
        samples = loaders.setdefault(record.loader, LoaderSamples(record.kinds))
        if samples.kinds == record.kinds:
            samples.add(rank.number, record)

    @collects_per_module(LabelsRecord)
    def add_labels(self, rank: RankData, module: ModuleKey, record: LabelsRecord) -> None:
        columns = self._labels.setdefault((module, record.loader), {})
        columns.setdefault((record.part, record.term, record.ahead), {})[rank.number] = record

    def label_difference(self, loader: int, module: ModuleKey) -> LabelDifference | None:
        """The first one, if ranks have mapped the same labels to different classes.

        Ranks with data of their own may have a meaning of their own for a label.
        """
        if len({record.mark for record in self._of(loader, module).values()}) > 1:
            return None
        for _, by_rank in sorted(self._labels.get((module, loader), {}).items()):
            # Where a rank ignores a label, it has no class of its own for it.
            classes: dict[str, dict[int, int]] = {}
            for rank, record in sorted(by_rank.items()):
                for label, target in record.targets.items():
                    if target >= 0:
                        classes.setdefault(label, {})[rank] = target
            differing = {label: each for label, each in classes.items() if len(set(each.values())) > 1}
            if differing:
                pairs = {
                    frozenset((one, other))
                    for by_rank_ in differing.values()
                    for one, other in combinations(by_rank_, 2)
                    if by_rank_[one] != by_rank_[other]
                }
                outliers = outliers_of(
                    [rank for rank, record in sorted(by_rank.items()) if record.targets], pairs
                )
                return LabelDifference(max(by_rank[rank].step for rank in outliers), outliers, differing)
        return None

    def same_data(self, loader: int, module: ModuleKey) -> bool:
        """Whether an index should name the same sample on all ranks: one dataset is split among them."""
        records = self._of(loader, module)
        if len(records) < len(module[0]) or len({record.length for record in records.values()}) > 1:
            return False
        replicas = {record.replicas for record in records.values()}
        marks = {record.mark for record in records.values()}
        return replicas == {len(module[0])} or (len(marks) == 1 and "" not in marks)

    def reordered(self, loader: int, module: ModuleKey) -> Mapping[int, LoaderRecord]:
        """The loaders by rank, if their datasets have the same entries in another order; else empty."""
        records = self._of(loader, module)
        if not self.same_data(loader, module) or not all(record.columns for record in records.values()):
            return {}
        if len({(len(record.columns), tuple(record.members)) for record in records.values()}) > 1:
            return {}
        columns = list(zip(*(record.columns for record in records.values()), strict=True))
        whole = all(
            len(record.members) == len(record.columns) and all(record.members) for record in records.values()
        )
        # All columns must differ: a single one may be random, such as an order of its own.
        return records if whole and all(len(set(column)) > 1 for column in columns) else {}

    def loaders(self) -> list[int]:
        return sorted(self._loaders)

    def _of(self, loader: int, module: ModuleKey) -> dict[int, LoaderRecord]:
        return {rank: record for rank, record in self._loaders.get(loader, {}).items() if rank in module[0]}
