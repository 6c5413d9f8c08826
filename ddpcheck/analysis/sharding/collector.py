"""Collects steps on shards whose gradients were not reduced yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects_per_module
from ddpcheck.records.kinds.shards import PendingGradientsRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt


@dataclass(frozen=True)
class PendingSteps:
    """The first such step of one reason, and the ranks that took it."""

    first: PendingGradientsRecord
    ranks: tuple[int, ...]


class PendingGradientsCollector(Collector):
    """The latest record of each rank and module."""

    def __init__(self, attempt: Attempt) -> None:
        self.latest: dict[tuple[int, ModuleKey], PendingGradientsRecord] = {}

    @collects_per_module(PendingGradientsRecord)
    def add(self, rank: RankData, module: ModuleKey, record: PendingGradientsRecord) -> None:
        self.latest[rank.number, module] = record

    def by_reason(self) -> list[PendingSteps]:
        found: dict[str, list[tuple[int, PendingGradientsRecord]]] = {}
        for (rank, _), record in sorted(self.latest.items()):
            found.setdefault(record.reason, []).append((rank, record))
        return [
            PendingSteps(
                min((record for _, record in records), key=lambda record: (record.step, -record.steps)),
                tuple(sorted({rank for rank, _ in records})),
            )
            for records in found.values()
        ]
