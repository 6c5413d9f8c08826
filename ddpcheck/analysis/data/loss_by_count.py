"""Tests whether the losses of ranks grow with the number of their rows or tokens, as a sum does and a mean does not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

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
