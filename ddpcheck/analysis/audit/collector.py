"""Collects the audits of an attempt, and keeps the rounds in which gradients differ."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.agreement import PendingValues
from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects_per_module
from ddpcheck.analysis.audit.vote import Round, count_votes
from ddpcheck.records.kinds.audit import AuditRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt

# Rounds that wait for further ranks: each holds the digests of all gradients.
_MOST_PENDING = 64
_MOST_DIFFERING = 64


@dataclass
class AuditStats:
    """The audits of one module."""

    # Audited steps, micro-batches that were computed again, and pairs of results that agree.
    rounds: int = 0
    audited: int = 0
    agreeing: int = 0
    # The first rounds in which results differ.
    differing: list[Round] = field(default_factory=list)
    # By value of `AuditSkip`.
    skipped: Counter[str] = field(default_factory=Counter)
    # Parameters that no audit compared.
    excluded: set[int] | None = None
    # Of the rank that took the most, summed over the audits; and the largest file.
    microseconds: int = 0
    bytes: int = 0


class AuditCollector(Collector):
    """Counts the votes of a step when all ranks have reported."""

    def __init__(self, attempt: Attempt) -> None:
        self.stats: dict[ModuleKey, AuditStats] = {}
        self._pending: PendingValues[tuple[ModuleKey, int], tuple[RankData, AuditRecord]] = PendingValues()

    @collects_per_module(AuditRecord)
    def add(self, rank: RankData, module: ModuleKey, record: AuditRecord) -> None:
        key = (module, record.step)
        if self._pending.add(key, module[0], rank.number, (rank, record)):
            self._count(key)
        elif len(self._pending) > _MOST_PENDING:
            self._count(self._pending.oldest())

    def end_rank(self, rank: RankData) -> None:
        for key in self._pending.end_rank(rank.number):
            self._count(key)

    def end(self, attempt: Attempt) -> None:
        for key in list(self._pending):
            self._count(key)

    def _count(self, key: tuple[ModuleKey, int]) -> None:
        module, step = key
        values = self._pending.take(key)
        records = {number: record for number, (_, record) in values.items()}
        rank, first = next(iter(values.values()))
        rows = rank.description(module, first.revision).parameters
        result = count_votes(
            step, records, [str(row[1]) for row in rows], [math.prod(row[2]) for row in rows]
        )
        stats = self.stats.setdefault(module, AuditStats())
        stats.rounds += 1
        stats.audited += result.audited
        stats.agreeing += len(result.agreeing)
        stats.skipped.update(result.skipped)
        stats.microseconds += max(record.microseconds for record in records.values())
        stats.bytes = max(stats.bytes, *(record.bytes for record in records.values()))
        if result.audited:
            excluded = set.intersection(*(set(record.excluded) for record in records.values()))
            stats.excluded = excluded if stats.excluded is None else stats.excluded & excluded
        if result.differences and len(stats.differing) < _MOST_DIFFERING:
            stats.differing.append(result)
