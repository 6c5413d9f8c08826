"""Does a rank's loss grow with the number of samples behind it? A mean does not; a sum does.

DDP averages over ranks. Where losses are means over each rank's own samples, unequal counts weight samples unequally;
where they are sums, or are divided by the count of all ranks, they do not. How a loss is made cannot be seen, but what
became of it can: over the steps, the slope of its logarithm over that of the count is near 0 for the one and near 1 for
the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# Ranks that are looked at, and steps; of a long job every so-manieth, as the losses are kept.
MOST_RANKS = 16
MOST_STEPS = 1024
LEAST_STEPS = 3
# Between the slopes of a mean and of a sum, and how many standard errors it has to be away from there.
BETWEEN = 0.5
ERRORS = 2.5
# By so much may the data of one rank be harder than that of another all along, in logarithms.
HARDER = 0.1

# By rank and step.
Losses = Mapping[int, Mapping[int, float]]


@dataclass
class CountBook:
    """By step, what each rank counted; only steps at which they did not count the same."""

    tolerance: float
    every: int = 1
    steps: dict[int, dict[int, int]] = field(default_factory=dict)
    _step: int = -1
    _counted: dict[int, int] = field(default_factory=dict)

    def add(self, step: int, said: Mapping[int, int]) -> None:
        """A forward; those of one step add up, as their losses do."""
        if step != self._step:
            self._close()
            self._step = step
        for rank in sorted(said)[:MOST_RANKS]:
            self._counted[rank] = self._counted.get(rank, 0) + said[rank]

    def _close(self) -> None:
        counted, self._counted = self._counted, {}
        if self._step % self.every or len(counted) < 2:
            return
        if max(counted.values()) > self.tolerance * min(counted.values()):
            self.steps[self._step] = counted
        while len(self.steps) > MOST_STEPS:
            self.every *= 2
            self.steps = {step: said for step, said in self.steps.items() if step % self.every == 0}

    def grows(self, losses: Losses) -> bool:
        """Whether losses clearly grow with the counts. False also where that cannot be told."""
        self._close()
        rows = [row for step, said in self.steps.items() if (row := _row(step, said, losses))]
        if len(rows) < LEAST_STEPS:
            return False
        ranks = sorted(set.intersection(*(set(row) for row in rows)))
        if len(ranks) < 2:
            return False
        counts = _centred([[row[rank][0] for rank in ranks] for row in rows])
        values = _centred([[row[rank][1] for rank in ranks] for row in rows])
        return _within(counts, values) or _between(counts, values)


def _row(step: int, said: Mapping[int, int], losses: Losses) -> dict[int, tuple[float, float]]:
    """By rank the logarithms of count and loss; nothing of a step with a loss that has none."""
    row = {}
    for rank, count in said.items():
        loss = losses.get(rank, {}).get(step, 0.0)
        if not (0.0 < loss < math.inf) or count <= 0:
            return {}
        row[rank] = (math.log(count), math.log(loss))
    return row


def _centred(table: list[list[float]]) -> list[list[float]]:
    """Over the ranks of each step: how training goes along is the same for all."""
    return [[value - sum(row) / len(row) for value in row] for row in table]


def _means(table: list[list[float]]) -> list[float]:
    return [sum(column) / len(table) for column in zip(*table, strict=True)]


def _within(counts: list[list[float]], values: list[list[float]]) -> bool:
    """By what each rank's counts do from step to step: whose data is harder does not matter."""
    usual_count, usual_value = _means(counts), _means(values)
    xs = [x - usual for row in counts for x, usual in zip(row, usual_count, strict=True)]
    ys = [y - usual for row in values for y, usual in zip(row, usual_value, strict=True)]
    spread = sum(x * x for x in xs)
    free = (len(counts) - 1) * (len(usual_count) - 1) - 1
    if spread < 1e-6 or free < 1:
        return False
    slope = sum(x * y for x, y in zip(xs, ys, strict=True)) / spread
    left = sum((y - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    return slope - ERRORS * math.sqrt(left / free / spread) > BETWEEN


def _between(counts: list[list[float]], values: list[list[float]]) -> bool:
    """By ranks that have more than others all along: only where that is more than harder data explains."""
    xs, ys = _means(counts), _means(values)
    spread = sum(x * x for x in xs)
    if spread < 1e-6:
        return False
    slope = sum(x * y for x, y in zip(xs, ys, strict=True)) / spread
    return slope - ERRORS * HARDER / math.sqrt(spread) > BETWEEN
