"""Collects what each rank trains and how much of it is compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects
from ddpcheck.records.kinds.coverage import StepCoverageRecord, TrainingRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt


class StepCoverageCollector(Collector):
    """Keeps the latest totals of each rank. Runs of earlier versions have none."""

    def __init__(self, attempt: Attempt) -> None:
        # By rank, and by the number of the entry on that rank.
        self.entries: dict[int, dict[int, StepCoverageRecord]] = {}
        self.training: dict[int, TrainingRecord] = {}

    def steps(self, rank: int) -> int:
        """Steps of the rank's optimizer with the most."""
        return max((entry.steps for entry in self.entries.get(rank, {}).values()), default=0)

    @collects(StepCoverageRecord)
    def add_entry(self, rank: RankData, record: StepCoverageRecord) -> None:
        self.entries.setdefault(rank.number, {})[record.entry] = record

    @collects(TrainingRecord)
    def add_training(self, rank: RankData, record: TrainingRecord) -> None:
        self.training[rank.number] = record
