"""Verifies each reduced backward while records are read: is the result the mean of the local gradients?"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from ddpcheck.analysis.aggregate.agreement import PendingValues, comparable
from ddpcheck.analysis.aggregate.compared_steps import ComparedSteps
from ddpcheck.analysis.aggregate.rank_data import SKETCH_PROBES, ModuleKey, RankData, members
from ddpcheck.analysis.aggregate.registry import Collector, collects, collects_per_module
from ddpcheck.analysis.aggregate.step_columns import equal_on_all_ranks
from ddpcheck.analysis.allreduce.contributions import FEWEST_RANKS, Contribution, ContributionCheck
from ddpcheck.analysis.allreduce.gradient_weights import GradientWeights
from ddpcheck.analysis.allreduce.mean_check import (
    NOTHING,
    Compared,
    MeanCheckResult,
    Parts,
    SketchTable,
    actual_result,
    can_check,
    check_parts,
    roundoff,
)
from ddpcheck.analysis.cost.collector import CostCollector
from ddpcheck.analysis.timeseries.collector import GradientSeries
from ddpcheck.records.codecs import shares
from ddpcheck.records.kinds.gradients import BackwardRecord
from ddpcheck.records.kinds.modules import JoinRecord, ModuleRecord
from ddpcheck.records.kinds.rank import FaultRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.launch import Attempt
    from ddpcheck.analysis.aggregate.step_columns import Stream
    from ddpcheck.analysis.aggregate.step_window import Window

# The divisor of a backward inside join(): the number of ranks that still have data.
LIVE_RANKS = -1
# A rank may not report for long, or never: at most this many backwards wait for it.
MOST_PENDING = 1024
# Groups of ranks with identical gradients whose steps are kept.
MOST_IDENTICAL = 64


@dataclass(frozen=True)
class MeanMismatch:
    """A parameter whose reduced gradient is not the mean of the local ones."""

    number: int
    step: int
    # Of the parameter.
    index: int
    outcome: MeanCheckResult
    # The rank whose copy of the reduced gradient was compared.
    rank: int


@dataclass(frozen=True)
class NonFinite:
    """The first gradients with NaN or infinity."""

    number: int
    step: int
    ranks: tuple[int, ...]
    # Of the first parameter in the order of the backward.
    index: int
    count: int
    # How many gradients of the first rank have any; 0: the reduction produced them.
    gradients: int = 0


@dataclass
class ErrorSum:
    """Whether the errors of consecutive backwards cancel, as far as sketches show it.

    A hook with error feedback adds what it left out to the next gradient, so the sum of its results follows the sum of
    the means: single errors are large, and the error of the sum stays bounded. A wrong factor has the same relative
    error in both.
    """

    backwards: int = 0
    _number: int = -1
    # By parameter, the sum of the errors and of the means.
    _sums: dict[int, tuple[float, float]] = field(default_factory=dict)
    # Squares of errors and means: of single backwards, and of the sums after each backward.
    _single: tuple[float, float] = (0.0, 0.0)
    _summed: tuple[float, float] = (0.0, 0.0)

    def add(self, number: int, errors: Mapping[int, tuple[float, float]]) -> None:
        """`errors`: by parameter, the error of this backward and the mean that it should have been."""
        if number != self._number + 1:
            self.backwards, self._sums, self._single, self._summed = 0, {}, (0.0, 0.0), (0.0, 0.0)
        self._number = number
        self.backwards += 1
        for index, (error, mean) in errors.items():
            if not (math.isfinite(error) and math.isfinite(mean)):
                continue
            before = self._sums.get(index, (0.0, 0.0))
            after = self._sums[index] = (before[0] + error, before[1] + mean)
            self._single = (self._single[0] + error * error, self._single[1] + mean * mean)
            self._summed = (self._summed[0] + after[0] * after[0], self._summed[1] + after[1] * after[1])

    @property
    def single(self) -> float:
        """The error of a backward relative to the mean."""
        return math.sqrt(self._single[0] / self._single[1]) if self._single[1] else math.inf

    @property
    def summed(self) -> float:
        """The error of the sum of all results so far, relative to the sum of the means."""
        return math.sqrt(self._summed[0] / self._summed[1]) if self._summed[1] else math.inf


@dataclass
class MeanCheckStats:
    """The results of all reduced backwards of one module."""

    checked: int = 0
    mismatches: int = 0
    first: MeanMismatch | None = None
    # What the first wrong result is instead of the mean; empty: unknown.
    actual: str = ""
    # The rank without which it was computed.
    actual_rank: int | None = None
    # Ranks that are missing from the mean, as the statistics of several steps show; None: no such ranks.
    contribution: Contribution | None = None
    # Largest error over the gradient's norm: hooks may lose precision on purpose.
    worst_relative: float = 0.0
    # Errors of the latest consecutive backwards, from the first wrong one on.
    errors: ErrorSum = field(default_factory=ErrorSum)
    # Ranks with bit-identical local gradients, and in how many backwards.
    identical: dict[tuple[int, ...], int] = field(default_factory=dict)
    # Steps whose local gradients are known, and those at which the ranks above had identical ones.
    sketched_steps: ComparedSteps = field(default_factory=ComparedSteps)
    identical_steps: dict[tuple[int, ...], ComparedSteps] = field(default_factory=dict)
    nonfinite: NonFinite | None = None
    weights: GradientWeights = field(default_factory=GradientWeights)
    # Number and step of the first backward whose result differs across ranks, and the last step before it with a
    # result that agrees: not every step is sketched.
    diverged: tuple[int, int] | None = None
    agreed_until: int = -1
    # Steps before it at which all ranks received the same result.
    agreed: ComparedSteps = field(default_factory=ComparedSteps)
    # Backwards after which every rank still held its local gradients: nothing was reduced.
    unreduced: int = 0
    # The last step, before the first of those, at which gradients were reduced.
    reduced_until: int = -1

    def results_compared(self, step: int) -> bool:
        """Whether the results of this step were compared across ranks, up to the first that differ."""
        return step in self.agreed or (self.diverged is not None and self.diverged[1] == step)


@dataclass
class AllReduceVerifier:
    """Verifies all reduced backwards of an attempt; each is dropped once all ranks have reported it."""

    stats: dict[ModuleKey, MeanCheckStats] = field(default_factory=dict)
    # Modules that train inside join(): ranks without data contribute zeros and write no record.
    joined: set[ModuleKey] = field(default_factory=set)
    # Ranks that may have contributed gradients without a record.
    lost: set[int] = field(default_factory=set)
    # By rank, its hash algorithm.
    hashes: Mapping[int, str] = field(default_factory=dict)
    # Whether the budget of a rank left out a step: it contributed gradients without a record.
    left_out: Callable[[int, int], bool] = field(default=lambda rank, step: False)
    # Whether a rank has described the module. Of other ranks, no record of it can be read.
    describes: Callable[[int, ModuleKey], bool] = field(default=lambda rank, module: True)
    series: dict[ModuleKey, GradientSeries] = field(default_factory=dict)
    _contributions: dict[ModuleKey, ContributionCheck] = field(default_factory=dict)
    _pending: PendingValues[tuple[ModuleKey, int], BackwardRecord] = field(default_factory=PendingValues)
    # How many ranks had ended and were lost at the last check.
    _gone: tuple[int, int] = (0, 0)
    # By module, the description of each backward that waits for ranks.
    _descriptions: dict[ModuleKey, dict[int, ModuleRecord]] = field(default_factory=dict)

    def add(
        self,
        rank: int,
        module: ModuleKey,
        record: BackwardRecord,
        description: ModuleRecord,
        ended: Collection[int],
    ) -> None:
        """`ended`: ranks that write no more records."""
        if rank not in members(module):
            return
        # Compare counts: this runs for every record.
        if self._gone != (len(ended), len(self.lost)):
            self._gone = (len(ended), len(self.lost))
            self._stop_waiting({*ended, *self.lost})
        if rank in self.lost and (module, record.number) not in self._pending:
            # The other ranks may have been compared without it: alone, it would count as the only one with data.
            return
        self._described(module)[record.number] = description
        if self._pending.add((module, record.number), members(module), rank, record):
            self._finish(module, record.number)
        elif len(self._pending) > MOST_PENDING:
            # The missing rank may not have been read yet, so it is unknown which ranks took part.
            self._finish(*self._pending.oldest(), early=True)

    def _described(self, module: ModuleKey) -> dict[int, ModuleRecord]:
        return self._descriptions.setdefault(module, {})

    def _stop_waiting(self, ranks: Collection[int]) -> None:
        """Backwards that wait for these ranks only are verified at the end, like all that remain."""
        for rank in self._pending.active(ranks):
            self._pending.end_rank(rank)

    def end(self) -> None:
        for module, number in sorted(self._pending):
            self._finish(module, number)

    def _finish(self, module: ModuleKey, number: int, early: bool = False) -> None:
        records = self._pending.take((module, number))
        description = self._described(module).pop(number)
        try:
            local = SketchTable({rank: record.local for rank, record in records.items()})
            reduced = SketchTable(
                {rank: record.reduced for rank, record in records.items() if record.reduced}
            )
        except (TypeError, ValueError):
            return  # a damaged record
        self._verify(module, number, records, local, reduced, description, early=early)

    def add_window(self, stream: Stream, description: ModuleRecord) -> None:
        """Verify the backwards of a window, in which all gradients are finite."""
        module, ranks = stream.module, [rank.number for rank in stream.ranks]
        if "local" not in stream.rows[0][0].table.columns and not stream.constants["local"]:
            # Only searched for NaN and infinity.
            self.stats.setdefault(module, MeanCheckStats())
            return
        roots, numbers = stream.texts("root"), stream.integers("number")
        local, reduced = _sketches(stream, "local"), _sketches(stream, "reduced")
        if roots is None or local is None or reduced is None or (numbers != numbers[:1]).any():
            agreed = [False] * len(stream)
        else:
            agreed = equal_on_all_ranks(roots).tolist()
        for row, step in enumerate(stream.steps.tolist()):
            if not agreed[row] or local is None or reduced is None:
                for index, rank in enumerate(stream.ranks):
                    record = cast("BackwardRecord", stream.record_at(index, row))
                    self.add(rank.number, module, record, description, ())
                continue
            try:
                own, results = [
                    SketchTable(_of_row(each, ranks, row, len(stream))) for each in (local, reduced)
                ]
            except ValueError:
                continue  # a damaged record
            # Ranks differ only in their sketches.
            same = BackwardRecord(
                number=int(numbers[0, row]), step=step, local="sketched", reduced="", root=""
            )
            self._verify(module, same.number, dict.fromkeys(ranks, same), own, results, description)

    def _verify(
        self,
        module: ModuleKey,
        number: int,
        records: Mapping[int, BackwardRecord],
        local: SketchTable,
        reduced: SketchTable,
        description: ModuleRecord,
        *,
        early: bool = False,
    ) -> None:
        stats = self.stats.setdefault(module, MeanCheckStats())
        self._note_nonfinite(stats, records)
        # Without sketches, a backward was only searched for NaN and infinity.
        if len(module[0]) < 2 or not any(record.local for record in records.values()):
            return
        self._note_identical(stats, records, local)
        self._compare_results(stats, number, records)
        complete = not early and len(local) > 0 and self._all_known(module, records)
        mismatches, ratio = (
            self._mismatches(records, local, reduced, module, description, stats) if complete else ([], None)
        )
        series = self.series.setdefault(module, GradientSeries(len(module[0])))
        # The norm needs the shares of all ranks.
        series.note(min(one.step for one in records.values()), local, reduced if complete else None, ratio)
        if not complete:
            return
        stats.checked += 1
        if len(local.ranks) == len(module[0]):
            stats.weights.add(local)
        if mismatches:
            stats.mismatches += 1
            if stats.first is None:
                stats.first = max(mismatches, key=lambda mismatch: mismatch.outcome.ratio)

    def _compare_results(
        self, stats: MeanCheckStats, number: int, records: Mapping[int, BackwardRecord]
    ) -> None:
        if stats.diverged is not None or len(records) < 2:
            return
        step = min(record.step for record in records.values())
        if len({record.root for record in comparable(records, self.hashes).values()}) > 1:
            stats.diverged = (number, step)
        else:
            stats.agreed_until = max(stats.agreed_until, step)
            stats.agreed.add(step)

    def _all_known(self, module: ModuleKey, records: Mapping[int, BackwardRecord]) -> bool:
        """Whether the mean is known: every rank that contributed has a record."""
        missing = set(module[0]) - set(records)
        if not missing:
            return True
        step = min(record.step for record in records.values())
        contributed = missing & self.lost or any(
            self.left_out(rank, step) or not self.describes(rank, module) for rank in missing
        )
        return module in self.joined and not contributed

    def _mismatches(
        self,
        records: Mapping[int, BackwardRecord],
        local: SketchTable,
        reduced: SketchTable,
        module: ModuleKey,
        description: ModuleRecord,
        stats: MeanCheckStats,
    ) -> tuple[list[MeanMismatch], float | None]:
        """The parameters with a wrong result, and the largest ratio of error and rounding bound."""
        group, rows = module[0], description.parameters
        shares_by_rank = shares(description)
        mismatches: list[MeanMismatch] = []
        unreduced: list[MeanMismatch] = []
        compared: list[Compared] = []
        errors: dict[int, tuple[float, float]] = {}
        worst: float | None = None
        for rank in reduced.ranks_in_order:
            record = records[rank]
            divisor = len(records) if record.divisor == LIVE_RANKS else len(group)
            for index, result in zip(shares_by_rank[rank], reduced.row(rank), strict=False):
                row = rows[index]
                if index in record.absent or not can_check(row[1]):
                    continue
                parts = local.parts(index) if index < len(local) else NOTHING
                outcome = check_parts(parts, result, row[1], math.prod(row[2]), divisor)
                worst = max(worst or 0.0, outcome.ratio)
                compared.append(Compared(parts, result, row[1], math.prod(row[2]), index))
                if parts.known and result.known:
                    mean = parts.value / divisor
                    errors[index] = (result.value - mean, mean)
                if not outcome.ok:
                    mismatches.append(MeanMismatch(record.number, record.step, index, outcome, rank))
                    own = local.at(rank, index)
                    if own is not None and result.value == own.value:
                        unreduced.append(mismatches[-1])
                stats.worst_relative = max(stats.worst_relative, _relative(outcome, parts, divisor))
        if mismatches and stats.first is None:
            stats.actual, stats.actual_rank = actual_result(compared, local, group)
        if stats.contribution is None and len(group) >= FEWEST_RANKS:
            self._check_contributions(module, records, local, compared, stats)
        if mismatches or stats.first is not None:
            stats.errors.add(next(iter(records.values())).number, errors)
        # One rank and a few parameters are not enough: a broken reduction may leave a gradient unchanged.
        several = len(mismatches) * 2 > len(compared) or len({mismatch.rank for mismatch in unreduced}) > 1
        if mismatches and len(unreduced) == len(mismatches) and several:
            stats.unreduced += 1
        elif not stats.unreduced:
            stats.reduced_until = max(record.step for record in records.values())
        return mismatches, worst

    def _check_contributions(
        self,
        module: ModuleKey,
        records: Mapping[int, BackwardRecord],
        local: SketchTable,
        compared: Sequence[Compared],
        stats: MeanCheckStats,
    ) -> None:
        # Ranks that share no backward of join() change the divisor.
        if len(records) != len(module[0]) or len(local.ranks) != len(records):
            return
        check = self._contributions.setdefault(module, ContributionCheck())
        step = min(record.step for record in records.values())
        roundoffs = [roundoff(each.dtype) for each in compared]
        stats.contribution = check.add(step, len(records), local, compared, roundoffs)

    def _note_nonfinite(self, stats: MeanCheckStats, records: Mapping[int, BackwardRecord]) -> None:
        """Find where it started: before the reduction, only the ranks of origin have it.

        Between sketches only these ranks write a record, so the first backward may be verified last.
        """
        record = next(iter(records.values()))
        if stats.nonfinite is not None and stats.nonfinite.number <= record.number:
            return
        origins = {rank: one for rank, one in records.items() if one.local_nonfinite}
        counts = origins[min(origins)].local_nonfinite if origins else _reduced_nonfinite(records)
        if counts:
            text = next(iter(counts))
            index = int(text) if text.isdigit() else 0
            count = sum(one.local_nonfinite.get(text, 0) for one in origins.values())
            ranks = tuple(sorted(origins or records))
            gradients = len(counts) if origins else 0
            stats.nonfinite = NonFinite(record.number, record.step, ranks, index, count, gradients)

    def _note_identical(
        self, stats: MeanCheckStats, records: Mapping[int, BackwardRecord], local: SketchTable
    ) -> None:
        step = min(record.step for record in records.values())
        stats.sketched_steps.add(step)
        if local.all_different():
            return
        by_sketch: dict[bytes, list[int]] = {}
        for rank in records:
            if local.any_gradient(rank) and local.all_known(rank):
                by_sketch.setdefault(local.packed_row(rank), []).append(rank)
        for ranks in by_sketch.values():
            if len(ranks) > 1:
                key = tuple(sorted(ranks))
                stats.identical[key] = stats.identical.get(key, 0) + 1
                if key in stats.identical_steps or len(stats.identical_steps) < MOST_IDENTICAL:
                    stats.identical_steps.setdefault(key, ComparedSteps()).add(step)


def _sketches(stream: Stream, name: str) -> list[bytes] | None:
    """By rank, the packed sketches of all rows; None where rows differ in length."""
    arrays = [stream.texts_of(index, name) for index in range(len(stream.ranks))]
    known = [array.tobytes() for array in arrays if array is not None]
    return known if len(known) == len(arrays) else None


def _of_row(sketches: Sequence[bytes], ranks: Sequence[int], row: int, rows: int) -> dict[int, bytes]:
    """The sketches of one row, of the ranks that have any."""
    by_rank = {}
    for rank, data in zip(ranks, sketches, strict=True):
        if data:
            size = len(data) // rows
            by_rank[rank] = data[row * size : (row + 1) * size]
    return by_rank


def _reduced_nonfinite(records: Mapping[int, BackwardRecord]) -> dict[str, int]:
    """By index, from the shares of all ranks."""
    counts = {
        index: count for record in records.values() for index, count in record.reduced_nonfinite.items()
    }
    return dict(sorted(counts.items(), key=lambda item: int(item[0]) if item[0].isdigit() else 0))


def _relative(outcome: MeanCheckResult, parts: Parts, divisor: int) -> float:
    """The error relative to the norm of the local gradients."""
    known = parts.norm if parts.known else sum(n * count for n, count in parts.norms if math.isfinite(n))
    norm = known / divisor
    return outcome.error / norm if norm and math.isfinite(outcome.error) else 0.0


class GradientCollector(Collector):
    """Verifies reduced gradients."""

    takes_windows = True

    def __init__(self, attempt: Attempt) -> None:
        self.verifier = AllReduceVerifier(hashes=attempt.agreement.hashes, describes=self._describes)
        self._ranks: dict[int, RankData] = {}
        # Ranks that write nothing more. One whose parameters are not digested any more goes on with its gradients.
        self._ended: set[int] = set()

    def begin_rank(self, rank: RankData) -> None:
        self._ranks[rank.number] = rank

    def end_rank(self, rank: RankData) -> None:
        self._ended.add(rank.number)

    def _describes(self, rank: int, module: ModuleKey) -> bool:
        known = self._ranks.get(rank)
        return known is not None and module in known.latest

    def add_window(self, window: Window) -> None:
        for stream in window.of(BackwardRecord):
            if stream.module not in self.verifier.joined and not self.verifier.lost:
                self.verifier.add_window(stream, self._description(stream.ranks[0], stream))
                continue
            for row in range(len(stream)):
                for index, rank in enumerate(stream.ranks):
                    self.add_backward(
                        rank, stream.module, cast("BackwardRecord", stream.record_at(index, row))
                    )

    @staticmethod
    def _description(rank: RankData, stream: Stream) -> ModuleRecord:
        return rank.description(stream.module, stream.constants["revision"])

    @collects_per_module(BackwardRecord)
    def add_backward(self, rank: RankData, module: ModuleKey, record: BackwardRecord) -> None:
        description = rank.description(module, record.revision)
        self.verifier.add(rank.number, module, record, description, self._ended)

    @collects_per_module(JoinRecord)
    def add_join(self, rank: RankData, module: ModuleKey, record: JoinRecord) -> None:
        self.verifier.joined.add(module)

    @collects(FaultRecord)
    def add_fault(self, rank: RankData, record: FaultRecord) -> None:
        if record.probe in SKETCH_PROBES:
            self.verifier.lost.add(rank.number)

    def end(self, attempt: Attempt) -> None:
        ranks = attempt.ranks
        members = {number for group, _ in attempt.modules() for number in group}
        self.verifier.lost |= {
            number for number in members if number not in ranks or ranks[number].end is None
        }
        self.verifier.left_out = attempt.collector(CostCollector).skips_allreduce
        self.verifier.end()
