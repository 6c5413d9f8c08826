"""Collects what ranks saved to checkpoints, loaded from them, and trained with afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.records.kinds.checkpoints import (
    OptimizerRestoreRecord,
    OptimizerState,
    RestoreRecord,
    ResumedDataRecord,
    SaveRecord,
)

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

# Of one module on one rank.
MOST_KEPT = 32
MOST_SAVES = 64


class RestoreCollector(Collector):
    """The first records of each rank, by module."""

    def __init__(self, attempt: Attempt) -> None:
        self.modules: dict[ModuleKey, dict[int, list[RestoreRecord]]] = {}
        self.optimizers: dict[ModuleKey, dict[int, list[OptimizerRestoreRecord]]] = {}
        self.data: dict[ModuleKey, dict[int, ResumedDataRecord]] = {}
        self.saves: dict[int, list[SaveRecord]] = {}

    @collects_per_module(RestoreRecord)
    def add_module(self, rank: RankData, module: ModuleKey, record: RestoreRecord) -> None:
        kept = self.modules.setdefault(module, {}).setdefault(rank.number, [])
        if len(kept) < MOST_KEPT:
            kept.append(record)

    @collects_per_module(OptimizerRestoreRecord)
    def add_optimizer(self, rank: RankData, module: ModuleKey, record: OptimizerRestoreRecord) -> None:
        kept = self.optimizers.setdefault(module, {}).setdefault(rank.number, [])
        if len(kept) < MOST_KEPT:
            kept.append(record)

    @collects_per_module(ResumedDataRecord)
    def add_data(self, rank: RankData, module: ModuleKey, record: ResumedDataRecord) -> None:
        self.data.setdefault(module, {}).setdefault(rank.number, record)

    @collects(SaveRecord)
    def add_save(self, rank: RankData, record: SaveRecord) -> None:
        kept = self.saves.setdefault(rank.number, [])
        if len(kept) < MOST_SAVES:
            kept.append(record)

    def resumed(self, module: ModuleKey, rank: int, file: str) -> bool:
        """Whether the rank continues the job that saved the file: it has loaded the optimizer's state as well."""
        return any(
            record.state == OptimizerState.LOADED.value and record.file == file
            for record in self.optimizers.get(module, {}).get(rank, ())
        )
