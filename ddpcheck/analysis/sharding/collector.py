"""Collects steps on shards whose gradients were not reduced yet, and verifies reductions of sharded gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpcheck.analysis.aggregate.rank_data import ModuleKey, RankData
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.analysis.allreduce.mean_check import MeanCheckResult
from ddpcheck.analysis.sharding.reductions import NOTHING, RankShard, actual_result, check_reduction
from ddpcheck.records.codecs import unpack
from ddpcheck.records.kinds.shards import PendingGradientsRecord, ReducedShardsRecord, ShardReductionRecord

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
        by_cause: dict[str, list[tuple[int, PendingGradientsRecord]]] = {}
        for (rank, _), record in sorted(self.latest.items()):
            by_cause.setdefault(record.reason, []).append((rank, record))
        return [
            PendingSteps(
                min((record for _, record in records), key=lambda record: (record.step, -record.steps)),
                tuple(sorted({rank for rank, _ in records})),
            )
            for records in by_cause.values()
        ]


# Reductions that wait for ranks; further ones are dropped.
MOST_REDUCTIONS = 1 << 16
# Wrong reductions of the first step with one: what they have in common names the mistake.
_MOST_WRONG = 64
# Steps of which it is known whether ranks computed the same gradients.
_MOST_STEPS = 64


@dataclass(frozen=True)
class WrongReduction:
    """A reduction of one parameter that did not return the mean."""

    step: int
    shards: Mapping[int, RankShard]
    outcome: MeanCheckResult

    @property
    def parameter(self) -> ReducedShardsRecord:
        return next(iter(self.shards.values())).parameter

    @property
    def relative_error(self) -> float:
        norm = sum(shard.local.norm for shard in self.shards.values()) / self.parameter.divisor
        return self.outcome.error / norm if norm else float("inf")


@dataclass
class ReductionStats:
    """The results of all reductions over the same ranks with the same implementation."""

    checked: int = 0
    steps: set[int] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    mismatches: int = 0
    # Those of the first step with a wrong one.
    wrong: list[WrongReduction] = field(default_factory=list)
    worst_relative: float = 0.0

    def worst(self) -> WrongReduction:
        return max(self.wrong, key=lambda each: each.outcome.ratio)

    def actual(self) -> tuple[str, int | None]:
        return actual_result([each.shards for each in self.wrong])


class ShardReductionCollector(Collector):
    """Compares each reduction as soon as all ranks that contribute have reported it."""

    def __init__(self, attempt: Attempt) -> None:
        # By ranks and the job's own implementation.
        self.stats: dict[tuple[tuple[int, ...], str], ReductionStats] = {}
        self._parameters: dict[tuple[int, int], ReducedShardsRecord] = {}
        # How often a rank has reduced a parameter at a step: a step may have several backwards.
        self._counts: dict[tuple[int, int], tuple[int, int]] = {}
        self._waiting: dict[tuple[object, ...], dict[int, RankShard]] = {}
        # By step and rank, a hash of the sketches of its whole gradients; of some of the steps that were sketched.
        self._local: dict[int, dict[int, int]] = {}

    @collects(ReducedShardsRecord)
    def add_parameter(self, rank: RankData, record: ReducedShardsRecord) -> None:
        self._parameters[rank.number, record.index] = record

    @collects(ShardReductionRecord)
    def add(self, rank: RankData, record: ShardReductionRecord) -> None:
        try:
            local, reduced, before = unpack(record.local), unpack(record.reduced), unpack(record.before)
        except ValueError:
            return  # a damaged record
        earlier = dict(zip(record.kept, before, strict=False))
        for index, whole, shard in zip(record.indices, local, reduced, strict=False):
            parameter = self._parameters.get((rank.number, index))
            if parameter is None or rank.number not in parameter.ranks:
                continue
            step, count = self._counts.get((rank.number, index), (-1, 0))
            count = count + 1 if step == record.step else 0
            self._counts[rank.number, index] = record.step, count
            # What describes the parameter on all ranks alike.
            key = (
                parameter.name,
                parameter.numel,
                parameter.shards,
                parameter.divisor,
                parameter.custom,
                tuple(parameter.dtypes),
                tuple(parameter.ranks),
                record.step,
                count,
            )
            waiting = self._waiting.get(key)
            if waiting is None:
                if len(self._waiting) >= MOST_REDUCTIONS:
                    continue
                waiting = self._waiting[key] = {}
            waiting[rank.number] = RankShard(parameter, whole, shard, earlier.get(index, NOTHING))
            if len(waiting) == len(parameter.ranks):
                self._check(record.step, self._waiting.pop(key))

    def local_gradients(self, ranks: Sequence[int]) -> dict[int, bool]:
        """By step, whether all these ranks computed the same gradients before the reduction."""
        known = {step: by_rank for step, by_rank in self._local.items() if by_rank.keys() >= set(ranks)}
        return {step: len({by_rank[rank] for rank in ranks}) == 1 for step, by_rank in known.items()}

    def _note_local(self, step: int, shards: Mapping[int, RankShard]) -> None:
        if step not in self._local and len(self._local) >= _MOST_STEPS:
            return
        by_rank = self._local.setdefault(step, {})
        for rank, shard in shards.items():
            # All ranks report the parameters in the same order.
            by_rank[rank] = hash((by_rank.get(rank, 0), shard.parameter.name, shard.local))

    def _check(self, step: int, shards: Mapping[int, RankShard]) -> None:
        self._note_local(step, shards)
        outcome = check_reduction(shards)
        if outcome is None:
            return
        parameter = next(iter(shards.values())).parameter
        stats = self.stats.setdefault((tuple(parameter.ranks), parameter.custom), ReductionStats())
        stats.checked += 1
        stats.steps.add(step)
        stats.parameters.add(parameter.name)
        if outcome.ok:
            return
        stats.mismatches += 1
        wrong = WrongReduction(step, shards, outcome)
        stats.worst_relative = max(stats.worst_relative, wrong.relative_error)
        if stats.wrong and step > stats.wrong[0].step:
            return
        if stats.wrong and step < stats.wrong[0].step:
            stats.wrong.clear()
        if len(stats.wrong) < _MOST_WRONG:
            stats.wrong.append(wrong)
