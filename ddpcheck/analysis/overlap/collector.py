"""Collects the traces of the ranks, and when gradients became ready in profiled steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.records.kinds.timing import ReadyRecord, TraceRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt


class ProfileCollector(Collector):
    """Bounded: few steps are profiled, and of the user's own traces only the last of each rank is kept."""

    def __init__(self, attempt: Attempt) -> None:
        self.traces: dict[int, TraceRecord] = {}
        # Ranks on which the user's own profiler was active.
        self.user_profiled: set[int] = set()
        # By module and rank, one for each reduced backward.
        self.ready: dict[ModuleKey, dict[int, list[ReadyRecord]]] = {}

    def __bool__(self) -> bool:
        return bool(self.traces or self.user_profiled)

    @collects(TraceRecord)
    def add_trace(self, rank: RankData, record: TraceRecord) -> None:
        known = self.traces.get(rank.number)
        if not record.file:
            self.user_profiled.add(rank.number)
        # A trace of ddpcheck is never replaced by one of the user's program.
        elif record.own or known is None or not known.own:
            self.traces[rank.number] = record

    @collects_per_module(ReadyRecord)
    def add_ready(self, rank: RankData, module: ModuleKey, record: ReadyRecord) -> None:
        self.ready.setdefault(module, {}).setdefault(rank.number, []).append(record)
