"""Collects the start-up stages of each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects
from ddpcheck.records.kinds.startup import StartupRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

MOST_RECORDS = 512


class StartupCollector(Collector):
    """The first records of each rank."""

    def __init__(self, attempt: Attempt) -> None:
        self.ranks: dict[int, list[StartupRecord]] = {}

    @collects(StartupRecord)
    def add(self, rank: RankData, record: StartupRecord) -> None:
        records = self.ranks.setdefault(rank.number, [])
        if len(records) < MOST_RECORDS:
            records.append(record)
