"""Collects the profile records of the ranks of an attempt."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.records.schema import ReadyRecord, TraceRecord


@dataclass
class ProfileCollector:
    """Bounded: a profile has a few steps, and only the last of a rank's own traces is used."""

    traces: dict[int, TraceRecord] = field(default_factory=dict)
    # Ranks on which the user's own profiler was running.
    aside: set[int] = field(default_factory=set)
    # By module and rank, one for each reduced backward.
    ready: dict[ModuleKey, dict[int, list[ReadyRecord]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.traces or self.aside)

    def trace(self, rank: int, record: TraceRecord) -> None:
        if not record.file:
            self.aside.add(rank)
        # A profile by ddpcheck has priority over later ones of the user's program.
        elif record.own or rank not in self.traces or not self.traces[rank].own:
            self.traces[rank] = record

    def readiness(self, rank: int, module: ModuleKey, record: ReadyRecord) -> None:
        self.ready.setdefault(module, {}).setdefault(rank, []).append(record)
