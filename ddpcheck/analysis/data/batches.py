"""Compares the batches of ranks in each forward, and tests whether losses grow with the number of rows."""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

from ddpcheck.analysis.aggregate.agreement import PendingValues
from ddpcheck.analysis.aggregate.compared_steps import ComparedSteps
from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.records.blocks import Encoding
from ddpcheck.records.kinds.data import BatchRecord
from ddpcheck.records.kinds.folds import FoldedRecord

if TYPE_CHECKING:
    from ddpcheck.analysis.aggregate.step_columns import Stream

# Limits of ranks and steps. Longer jobs are downsampled like the losses.
MOST_RANKS = 16
MOST_STEPS = 1024
LEAST_STEPS = 3
# The slope of log(loss) over log(count) is 0 for a mean and 1 for a sum. It must exceed this threshold by this many
# standard errors.
SLOPE_THRESHOLD = 0.5
STANDARD_ERRORS = 2.5
# Difference of log(loss) that ranks may have because their data differ in difficulty.
DIFFICULTY_SPREAD = 0.1

# By rank and step.
Losses = Mapping[int, Mapping[int, float]]


@dataclass
class LossByCount:
    """Counts by step and rank, for steps at which ranks had different counts."""

    tolerance: float
    every: int = 1
    steps: dict[int, dict[int, int]] = field(default_factory=dict)
    _step: int = -1
    _counts: dict[int, int] = field(default_factory=dict)

    def add(self, step: int, counts: Mapping[int, int]) -> None:
        """Add one forward. Counts of one step are summed, as its losses are."""
        if step != self._step:
            self._close()
            self._step = step
        for rank in sorted(counts)[:MOST_RANKS]:
            self._counts[rank] = self._counts.get(rank, 0) + counts[rank]

    def _close(self) -> None:
        counts, self._counts = self._counts, {}
        if self._step % self.every or len(counts) < 2:
            return
        if max(counts.values()) > self.tolerance * min(counts.values()):
            self.steps[self._step] = counts
        while len(self.steps) > MOST_STEPS:
            self.every *= 2
            self.steps = {step: kept for step, kept in self.steps.items() if step % self.every == 0}

    def grows(self, losses: Losses) -> bool:
        """Whether losses clearly grow with the counts. False also if there are too few steps or ranks."""
        self._close()
        rows = [row for step, counts in self.steps.items() if (row := _row(step, counts, losses))]
        if len(rows) < LEAST_STEPS:
            return False
        ranks = sorted(set.intersection(*(set(row) for row in rows)))
        if len(ranks) < 2:
            return False
        log_counts = _centred([[row[rank][0] for rank in ranks] for row in rows])
        log_losses = _centred([[row[rank][1] for rank in ranks] for row in rows])
        return _grows_within(log_counts, log_losses) or _grows_between(log_counts, log_losses)


def _row(step: int, counts: Mapping[int, int], losses: Losses) -> dict[int, tuple[float, float]]:
    """By rank, the logarithms of count and loss; empty if a loss of the step has no logarithm."""
    row = {}
    for rank, count in counts.items():
        loss = losses.get(rank, {}).get(step, 0.0)
        if not (0.0 < loss < math.inf) or count <= 0:
            return {}
        row[rank] = (math.log(count), math.log(loss))
    return row


def _centred(table: list[list[float]]) -> list[list[float]]:
    """Subtract the mean over ranks of each step, which removes the progress of training."""
    return [[value - sum(row) / len(row) for value in row] for row in table]


def _means(table: list[list[float]]) -> list[float]:
    return [sum(column) / len(table) for column in zip(*table, strict=True)]


def _grows_within(log_counts: list[list[float]], log_losses: list[list[float]]) -> bool:
    """Regression over the steps of each rank: independent of the difficulty of its data."""
    mean_counts, mean_losses = _means(log_counts), _means(log_losses)
    xs = [x - mean for row in log_counts for x, mean in zip(row, mean_counts, strict=True)]
    ys = [y - mean for row in log_losses for y, mean in zip(row, mean_losses, strict=True)]
    spread = sum(x * x for x in xs)
    degrees_of_freedom = (len(log_counts) - 1) * (len(mean_counts) - 1) - 1
    if spread < 1e-6 or degrees_of_freedom < 1:
        return False
    slope = sum(x * y for x, y in zip(xs, ys, strict=True)) / spread
    residual = sum((y - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return slope - STANDARD_ERRORS * math.sqrt(residual / degrees_of_freedom / spread) > SLOPE_THRESHOLD


def _grows_between(log_counts: list[list[float]], log_losses: list[list[float]]) -> bool:
    """Regression over the means of ranks: the slope must exceed what data of different difficulty explain."""
    xs, ys = _means(log_counts), _means(log_losses)
    spread = sum(x * x for x in xs)
    if spread < 1e-6:
        return False
    slope = sum(x * y for x, y in zip(xs, ys, strict=True)) / spread
    return slope - STANDARD_ERRORS * DIFFICULTY_SPREAD / math.sqrt(spread) > SLOPE_THRESHOLD


# A batch that is among the last ones of the same rank is ignored: the input may be constant.
RECENT_BATCHES = 8
RECENT_PARTS = 128
# Distinct pairs of ranks with a delay, and the least number of batches that one of them must have had later.
MOST_DELAYS = 256
LEAST_DELAYED = 4
# Ranks may exchange batches every other step on purpose.
LEAST_SHARE_OF_DELAYED = 0.75
# Forwards that wait for further ranks, which may never report.
MOST_PENDING = 4096
# Limit of distinct groups of ranks, and of distinct counts of a rank.
MOST_DISTINCT = 64
# Counts of ranks whose ratio is below this are taken as equal.
TOLERANCE = 1.1

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class BatchFingerprints:
    """The values of all ranks in one forward."""

    step: int
    forward: int
    values: Mapping[int, str | int]
    variety: int = 0


@dataclass
class SameBatches:
    """How often ranks had equal values where they should differ, and which ranks."""

    compared: int = 0
    same: int = 0
    by_ranks: Counter[Ranks] = field(default_factory=Counter)
    first: BatchFingerprints | None = None
    variety: int = 0
    # Steps with equal values, and in how many of these forwards ranks drew random numbers.
    steps: ComparedSteps = field(default_factory=ComparedSteps)
    drew: int = 0

    def add(self, groups: list[Ranks], example: BatchFingerprints, drew: bool = False) -> None:
        self.same += 1
        self.steps.add(example.step)
        self.drew += drew
        self.variety = max(self.variety, example.variety)
        if self.first is None:
            self.first = example
        for ranks in groups:
            if ranks in self.by_ranks or len(self.by_ranks) < MOST_DISTINCT:
                self.by_ranks[ranks] += 1

    def ranks(self) -> Ranks:
        """The ranks that most often had equal values."""
        return max(self.by_ranks.items(), key=lambda item: (item[1], len(item[0])))[0]


@dataclass
class Counts:
    """How much the counts of ranks differ."""

    compared: int = 0
    uneven: int = 0
    worst: BatchFingerprints | None = None
    ratio: float = 1.0
    # How often each count occurred, by rank.
    usual: dict[int, Counter[int]] = field(default_factory=dict)
    totals: Counter[int] = field(default_factory=Counter)
    losses: LossByCount = field(default_factory=lambda: LossByCount(TOLERANCE))

    def add(self, step: int, forward: int, counts: Mapping[int, int]) -> None:
        if len(counts) < 2:
            return
        self.compared += 1
        self.losses.add(step, counts)
        for rank, count in counts.items():
            frequencies = self.usual.setdefault(rank, Counter())
            if count in frequencies or len(frequencies) < MOST_DISTINCT:
                frequencies[count] += 1
            self.totals[rank] += count
        ratio = max(counts.values()) / min(counts.values())
        if ratio > TOLERANCE:
            self.uneven += 1
            if ratio > self.ratio:
                self.ratio, self.worst = ratio, BatchFingerprints(step, forward, dict(counts))

    def add_window(self, stream: Stream, name: str, steps: Sequence[int], forwards: Sequence[int]) -> None:
        """`add` for each forward of a window."""
        values = stream.integers(name)
        if not (values > 0).all(axis=0).any():
            return
        numbers = [rank.number for rank in stream.ranks]
        if (values == values[:, :1]).all() and values.max() <= TOLERANCE * values.min():
            counts = dict(zip(numbers, values[:, 0].tolist(), strict=True))
            self.compared += len(steps)
            for step in steps:
                self.losses.add(step, counts)
            for rank, count in counts.items():
                frequencies = self.usual.setdefault(rank, Counter())
                if count in frequencies or len(frequencies) < MOST_DISTINCT:
                    frequencies[count] += len(steps)
                self.totals[rank] += count * len(steps)
            return
        for step, forward, row in zip(steps, forwards, values.T.tolist(), strict=True):
            if min(row) > 0:
                self.add(step, forward, dict(zip(numbers, row, strict=True)))

    def regular(self) -> bool:
        """Whether each rank has the same batch size in most forwards, as with a DataLoader."""
        return all(2 * max(frequencies.values()) >= self.compared for frequencies in self.usual.values())


@dataclass
class ModuleBatches:
    """All comparisons of one module's inputs."""

    forwards: int = 0
    # Forwards that were not compared because ranks were at different steps.
    at_different_steps: int = 0
    batches: SameBatches = field(default_factory=SameBatches)
    draws: SameBatches = field(default_factory=SameBatches)
    # Random numbers that were drawn before the forward and are one of several input tensors.
    drawn_inputs: SameBatches = field(default_factory=SameBatches)
    rows: Counts = field(default_factory=Counts)
    tokens: Counts = field(default_factory=Counts)
    attended: Counts = field(default_factory=Counts)
    # How often a rank had the batch that another one had a number of forwards before, by those ranks and that number.
    delayed: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    _recent: dict[int, deque[str]] = field(default_factory=dict)
    # The forwards of the digests in `_recent`.
    _at: dict[int, deque[int]] = field(default_factory=dict)
    _recent_parts: dict[int, deque[str]] = field(default_factory=dict)

    def compare(self, forward: int, records: Mapping[int, BatchRecord]) -> None:
        steps = {forward if record.step is None else record.step for record in records.values()}
        if len(steps) > 1:
            self.at_different_steps += 1
            return
        step = steps.pop()
        self.forwards += 1
        self._compare_batches(step, forward, records)
        self._compare_draws(step, forward, records)
        self._compare_drawn_inputs(step, forward, records)
        self.rows.add(step, forward, _counts(records, "rows"))
        self.tokens.add(step, forward, _counts(records, "tokens"))
        self.attended.add(step, forward, _counts(records, "attended"))

    def compare_window(self, stream: Stream) -> bool:
        """Compare forwards of a window in which all ranks had new and different batches; False if they had not."""
        from numpy import array, concatenate, equal, uint64, zeros

        digests = stream.texts("digest")
        forwards, steps = stream.integers("forward"), _steps_of(stream, stream.integers("forward"))
        if digests is None or steps is None or not 0 < digests.shape[2] <= 8:
            return False
        if not (equal(forwards, forwards[:1]).all() and equal(steps, steps[:1]).all()):
            return False
        ranks, rows, width = digests.shape
        padded = zeros((ranks, rows, 8), "u1")
        padded[:, :, :width] = digests
        numbers = padded.view(uint64)[:, :, 0]
        recent = [self._recent.setdefault(rank.number, deque(maxlen=RECENT_BATCHES)) for rank in stream.ranks]
        before = array([_numbers_of(each, width) for each in recent], uint64)
        whole = concatenate([before, numbers], axis=1)
        for distance in range(1, RECENT_BATCHES + 1):
            if equal(whole[:, RECENT_BATCHES:], whole[:, RECENT_BATCHES - distance : -distance]).any():
                return False
        # At the same forward or at another one: ranks may read one stream at different positions.
        if _is_on_several_ranks(whole):
            return False
        self.forwards += rows
        self.batches.compared += rows
        for index, (rank, each) in enumerate(zip(stream.ranks, recent, strict=True)):
            each.extend(digest.tobytes().hex() for digest in digests[index, -RECENT_BATCHES:])
            at = self._at.setdefault(rank.number, deque(maxlen=RECENT_BATCHES))
            at.extend(forwards[index, -RECENT_BATCHES:].tolist())
        for counts, name in ((self.rows, "rows"), (self.tokens, "tokens"), (self.attended, "attended")):
            counts.add_window(stream, name, steps[0].tolist(), forwards[0].tolist())
        return True

    def _compare_batches(self, step: int, forward: int, records: Mapping[int, BatchRecord]) -> None:
        fresh: dict[int, str] = {}
        for rank, record in records.items():
            recent = self._recent.setdefault(rank, deque(maxlen=RECENT_BATCHES))
            if record.digest and record.digest not in recent:
                recent.append(record.digest)
                self._at.setdefault(rank, deque(maxlen=RECENT_BATCHES)).append(forward)
                fresh[rank] = record.digest
        if len(fresh) < 2:
            return
        self.batches.compared += 1
        # With few values, batches may be equal by chance.
        self._note_delays(forward, {r: one for r, one in fresh.items() if records[r].variety >= MANY_VALUES})
        groups = _equal_groups(fresh)
        if groups:
            variety = min(records[rank].variety for rank in groups[0])
            drew = any(records[rank].drew for rank in groups[0])
            self.batches.add(groups, BatchFingerprints(step, forward, fresh, variety), drew)

    def _note_delays(self, forward: int, fresh: Mapping[int, str]) -> None:
        """Ranks that read one stream at different positions have each other's batches at another time."""
        if len(fresh) > MOST_RANKS:
            return
        for later, digest in fresh.items():
            for earlier in fresh:
                recent = self._recent[earlier]
                if earlier != later and digest in recent:
                    delay = forward - self._at[earlier][recent.index(digest)]
                    if delay > 0 and (
                        (earlier, later, delay) in self.delayed or len(self.delayed) < MOST_DELAYS
                    ):
                        self.delayed[earlier, later, delay] += 1

    def delays(self) -> list[tuple[int, int, int]]:
        """Pairs of ranks of which one has the batches of the other some forwards later, each time; and how many."""
        return [
            pair
            for pair, count in self.delayed.most_common()
            if count >= LEAST_DELAYED and count >= LEAST_SHARE_OF_DELAYED * self.batches.compared
        ]

    def _compare_draws(self, step: int, forward: int, records: Mapping[int, BatchRecord]) -> None:
        drew = {rank: record.drew for rank, record in records.items() if record.drew}
        if len(drew) < 2:
            return
        self.draws.compared += 1
        groups = _equal_groups(drew)
        if groups:
            self.draws.add(groups, BatchFingerprints(step, forward, drew))

    def _compare_drawn_inputs(self, step: int, forward: int, records: Mapping[int, BatchRecord]) -> None:
        """Equal tensors in different batches, on ranks that drew the same random numbers before."""
        drew = {rank: record for rank, record in records.items() if record.parts}
        if len(drew) < 2:
            return
        self.drawn_inputs.compared += 1
        fresh: dict[int, set[str]] = {}
        for rank, record in drew.items():
            recent = self._recent_parts.setdefault(rank, deque(maxlen=RECENT_PARTS))
            fresh[rank] = {part for part in record.parts if part and part not in recent}
            recent.extend(record.parts)
        groups = [
            ranks
            for ranks in _equal_groups({rank: record.drew_before for rank, record in drew.items()})
            if set.intersection(*(fresh[rank] for rank in ranks))
            and len({drew[rank].digest for rank in ranks}) > 1
        ]
        if groups:
            self.drawn_inputs.add(
                groups, BatchFingerprints(step, forward, {r: one.drew_before for r, one in drew.items()})
            )


def _numbers_of(digests: Sequence[str], width: int) -> list[int]:
    """The last digests as integers, as many as are remembered; 0 means none."""
    known = [int.from_bytes(bytes.fromhex(text)[:8].ljust(8, b"\0"), sys.byteorder) for text in digests]
    return [0] * (RECENT_BATCHES - len(known)) + known


def _is_on_several_ranks(numbers: Any) -> bool:
    """Whether the rows of two ranks have a number in common. 0 means no digest."""
    from numpy import arange, argsort, repeat

    values, ranks = numbers.ravel(), repeat(arange(len(numbers)), numbers.shape[1])
    order = argsort(values, kind="stable")
    values, ranks = values[order], ranks[order]
    return bool(((values[1:] == values[:-1]) & (values[1:] != 0) & (ranks[1:] != ranks[:-1])).any())


def _steps_of(stream: Stream, forwards: Any) -> Any:
    """None where some records of a rank state the step and others do not."""
    columns = [row.table.columns.get("step") for rows in stream.rows for row in rows]
    if any(column is not None and column.encoding is Encoding.JSON for column in columns):
        return None
    parts = [
        row.table.constants.get("step")
        for rows in stream.rows
        for row in rows
        if "step" not in row.table.columns
    ]
    if all(step is None for step in parts) and parts:
        return forwards if len(parts) == sum(map(len, stream.rows)) else None
    return None if None in parts else stream.integers("step")


def _counts(records: Mapping[int, BatchRecord], name: str) -> dict[int, int]:
    """Empty unless all ranks have the count: a rank without it may do something else."""
    counts = {rank: int(getattr(record, name)) for rank, record in records.items()}
    return counts if all(count > 0 for count in counts.values()) else {}


def _equal_groups(values: Mapping[int, str]) -> list[Ranks]:
    """Ranks grouped by equal values, the largest group first; groups of one rank are left out."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    several = [tuple(ranks) for ranks in groups.values() if len(ranks) > 1]
    return sorted(several, key=lambda ranks: (-len(ranks), ranks))


class Batches:
    """Buffers records, and compares a forward once all ranks have reported."""

    def __init__(self) -> None:
        self.modules: dict[ModuleKey, ModuleBatches] = {}
        self._pending: PendingValues[tuple[ModuleKey, int], BatchRecord] = PendingValues()

    def add(self, rank: int, module: ModuleKey, record: BatchRecord) -> None:
        key = (module, record.forward)
        if self._pending.add(key, module[0], rank, record):
            self._finish(key)
        elif len(self._pending) > MOST_PENDING:
            self._finish(self._pending.oldest())

    def add_window(self, stream: Stream) -> None:
        """Add the batches of a window."""
        if len(stream.ranks) > 1 and self.modules.setdefault(stream.module, ModuleBatches()).compare_window(
            stream
        ):
            return
        for row in range(len(stream)):
            for index, rank in enumerate(stream.ranks):
                self.add(rank.number, stream.module, cast("BatchRecord", stream.record_at(index, row)))

    def add_folded(self, rank: int, module: ModuleKey, record: FoldedRecord) -> None:
        """Forwards that the launcher had compared. Which of them had equal batches is judged by those that are kept."""
        if rank == min(module[0]) and len(module[0]) > 1:
            self.modules.setdefault(module, ModuleBatches()).forwards += record.rows

    def end_rank(self, rank: int) -> None:
        for key in self._pending.end_rank(rank):
            self._finish(key)

    def end_all(self) -> None:
        for key in sorted(self._pending):
            self._finish(key)

    def _finish(self, key: tuple[ModuleKey, int]) -> None:
        module, forward = key
        records = self._pending.take(key)
        if len(records) > 1:
            self.modules.setdefault(module, ModuleBatches()).compare(forward, records)


# Distinct values in a batch: with few values, two batches may be equal by chance.
MANY_VALUES = 16
FEW_VALUES = 4
# For a job with a single forward.
SINGLE_FORWARD_VALUES = 32
# The least share of forwards with equal batches, for batches with many values and for others.
LEAST_SHARE_OF_MANY = 0.2
LEAST_SHARE_OF_FEW = 0.5
LEAST_REPEATS = 2


class Sameness(str, Enum):
    """How often ranks had equal batches."""

    NONE = "none"
    CONSTANT = "constant"
    NOW_AND_THEN = "now and then"
    # Equal inputs, but different gradients: reported by DDP301 only.
    SHARED_INPUT = "shared input"
    DUPLICATED = "duplicated"
    # Equal batches in different forwards: ranks read one sequence at different positions.
    DELAYED = "delayed"


def sameness(module: ModuleBatches) -> Sameness:
    batches = module.batches
    if not batches.same:
        return Sameness.DELAYED if module.delays() else Sameness.NONE
    if module.forwards == 1:
        return Sameness.DUPLICATED if batches.variety >= SINGLE_FORWARD_VALUES else Sameness.NONE
    # Constant inputs such as zeros, ones or the number of the step.
    if batches.variety < FEW_VALUES:
        return Sameness.NONE
    if batches.compared == 1:
        return Sameness.CONSTANT
    many = batches.variety >= MANY_VALUES
    share = batches.same / batches.compared
    if batches.same >= LEAST_REPEATS and share >= (LEAST_SHARE_OF_MANY if many else LEAST_SHARE_OF_FEW):
        return Sameness.DUPLICATED
    return Sameness.NOW_AND_THEN if many and batches.same >= LEAST_REPEATS else Sameness.NONE
