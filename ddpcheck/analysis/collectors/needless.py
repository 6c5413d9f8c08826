"""Collects searches for unused parameters, broadcasts in evaluations, and calls that wait in every step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.records.kinds.needless import HostWait, HostWaitsRecord, ModuleSyncsRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

# Fewer steps do not show what a job does in every step.
LEAST_STEPS = 8


@dataclass(frozen=True)
class WaitingSite:
    """Calls from one line of one rank that wait."""

    function: str
    where: str
    # Share of the steps with a call, calls and microseconds per step.
    share: float
    calls: float
    us: float


class NeedlessSyncsCollector(Collector):
    """The latest totals of each rank."""

    def __init__(self, attempt: Attempt) -> None:
        self.modules: dict[ModuleKey, dict[int, ModuleSyncsRecord]] = {}
        self._waits: dict[int, HostWaitsRecord] = {}

    @collects_per_module(ModuleSyncsRecord)
    def add_module(self, rank: RankData, module: ModuleKey, record: ModuleSyncsRecord) -> None:
        self.modules.setdefault(module, {})[rank.number] = record

    @collects(HostWaitsRecord)
    def add_waits(self, rank: RankData, record: HostWaitsRecord) -> None:
        self._waits.setdefault(rank.number, record)

    def of_all(self, module: ModuleKey) -> dict[int, ModuleSyncsRecord]:
        """The totals of a module by rank; empty unless every rank of its group has some."""
        by_rank = self.modules.get(module, {})
        return by_rank if all(rank in by_rank for rank in module[0]) else {}

    def waits(self, ranks: Iterable[int], kind: HostWait) -> dict[int, list[WaitingSite]]:
        """By rank, the calls that wait in at least half of the steps; empty unless every rank was watched."""
        by_rank = {}
        for rank in ranks:
            record = self._waits.get(rank)
            if record is None or record.steps < LEAST_STEPS:
                return {}
            sites = [
                WaitingSite(
                    str(function),
                    str(where),
                    int(steps) / record.steps,
                    int(calls) / record.steps,
                    int(us) / record.steps,
                )
                for of_kind, function, where, steps, calls, us in record.sites
                if of_kind == kind.value
            ]
            # Calls of one kind from several lines, in turns, are in every step too.
            in_loop = sum(site.share for site in sites) >= 0.5
            by_rank[rank] = sorted(sites, key=lambda site: -site.us) if in_loop else []
        return by_rank
