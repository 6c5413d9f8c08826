"""Gradient norms of one module over the steps: each point is the maximum over its steps."""

from __future__ import annotations

import math

from ddpcheck.analysis.allreduce.sketch_table import SketchTable
from ddpcheck.analysis.timeseries.series import AggregatedSeries

# Numbers kept for all ranks together, and points of each series within that.
MOST_NUMBERS = 24_000
MOST_POINTS = 1024
LEAST_POINTS = 16

# Keys of a point: ranks for their local norms, and these two.
REDUCED = -1
OFF_MEAN = -2
Point = dict[int, float]


class GradientSeries(AggregatedSeries[Point]):
    """Norms of local and reduced gradients, and the AllReduce error."""

    def __init__(self, ranks: int) -> None:
        super().__init__(max(LEAST_POINTS, min(MOST_POINTS, MOST_NUMBERS // (ranks + 2))), _maximum)

    def note(
        self, step: int, local: SketchTable, reduced: SketchTable | None, off_mean: float | None
    ) -> None:
        """Add one backward. Each rank sketches a share of the reduced gradients."""
        squares = {rank: local.square(rank) for rank in local.ranks}
        values = {rank: math.sqrt(square) for rank, square in squares.items() if square is not None}
        total = None if reduced is None else reduced.square()
        if total is not None:
            values[REDUCED] = math.sqrt(total)
        if off_mean is not None and math.isfinite(off_mean):
            values[OFF_MEAN] = off_mean
        self.add_value(step, values)


def _maximum(one: Point, other: Point) -> Point:
    return {**one, **{key: max(one.get(key, value), value) for key, value in other.items()}}
