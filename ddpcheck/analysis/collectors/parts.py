"""The parts that ranks have ended, all records of which were compared, and the records that were folded before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects
from ddpcheck.records.kinds.folds import SummaryRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt


@dataclass(frozen=True)
class EndedPart:
    """A part of one rank. Its steps were passed to all collectors."""

    number: int
    first: int
    end: int
    position: str


@dataclass(frozen=True)
class StepRange:
    """Steps whose parts begin and end at the same records on all ranks, and these parts by rank."""

    first: int
    end: int
    parts: dict[int, tuple[int, ...]]


class PartCollector(Collector):
    """By rank: the parts that were not taken out yet, the oldest first."""

    def __init__(self, attempt: Attempt) -> None:
        self.ranks: dict[int, list[EndedPart]] = {}

    @collects(SummaryRecord)
    def add(self, rank: RankData, record: SummaryRecord) -> None:
        part = EndedPart(record.part, record.first, record.end, record.position)
        self.ranks.setdefault(rank.number, []).append(part)

    def take(self, ranks: Sequence[int], left: int) -> list[StepRange]:
        """Remove and return steps that all of these ranks have ended, but not the last `left` parts of any of them."""
        if any(len(self.ranks.get(rank, ())) <= left for rank in ranks):
            return []
        ended = {rank: self.ranks[rank][: len(self.ranks[rank]) - left] for rank in ranks}
        common = set.intersection(
            *({(part.end, part.position) for part in parts if part.position} for parts in ended.values())
        )
        ranges = []
        for end, _ in sorted(common):
            parts: dict[int, tuple[int, ...]] = {}
            first = min(self.ranks[rank][0].first for rank in ranks)
            for rank in ranks:
                taken = [part.number for part in self.ranks[rank] if part.end <= end]
                parts[rank] = tuple(taken)
                del self.ranks[rank][: len(taken)]
            ranges.append(StepRange(first, end, parts))
        return ranges
