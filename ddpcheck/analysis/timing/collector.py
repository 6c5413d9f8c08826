"""Collects step times of the ranks, and the times of common events that show the offsets between host clocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.analysis.timing.clock_offsets import ClockOffsets
from ddpcheck.analysis.timing.rank_series import StepTimeSeries
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.timing import ClockRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt


class StepTimeCollector(Collector):
    """Step times by rank."""

    def __init__(self, attempt: Attempt) -> None:
        self.ranks: dict[int, StepTimeSeries] = {}

    @collects(ClockRecord)
    def add(self, rank: RankData, record: ClockRecord) -> None:
        series = self.ranks.get(rank.number)
        if series is None:
            series = self.ranks[rank.number] = StepTimeSeries.one_of(rank.header.world_size)
        series.add(record)


class ClockOffsetCollector(Collector):
    """Ends of reduced backwards by host."""

    def __init__(self, attempt: Attempt) -> None:
        self.offsets = ClockOffsets()

    @collects_per_module(BackwardRecord)
    def add(self, rank: RankData, module: ModuleKey, record: BackwardRecord) -> None:
        self.offsets.add(rank.header, module, record)
