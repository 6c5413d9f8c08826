"""Collects the loss of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects
from ddpcheck.analysis.timeseries.recorded import LossSeries
from ddpcheck.records.kinds.modules import LossRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt


class LossCollector(Collector):
    """The loss by rank and optimizer."""

    def __init__(self, attempt: Attempt) -> None:
        self.series: dict[tuple[int, int], LossSeries] = {}

    @collects(LossRecord)
    def add(self, rank: RankData, record: LossRecord) -> None:
        self.series.setdefault((rank.number, record.optimizer), LossSeries()).add(record)
