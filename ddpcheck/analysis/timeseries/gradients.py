"""Norms of gradients over the steps: once there are too many points, two become one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpcheck.analysis.allreduce.sketch_table import SketchTable

# Numbers kept for all ranks together, and points of each series within that.
MOST_NUMBERS = 24_000
MOST_POINTS = 1024
LEAST_POINTS = 16

# Rank's own norms by rank; REDUCED and OFF_MEAN are series of their own.
REDUCED = -1
OFF_MEAN = -2
Point = dict[int, float]


@dataclass
class GradientSeries:
    """One module's."""

    ranks: int
    every: int = 1
    # By number of the stretch of `every` steps; the largest of each.
    points: dict[int, Point] = field(default_factory=dict)

    def note(
        self,
        step: int,
        local: SketchTable,
        reduced: SketchTable | None,
        off_mean: float | None,
    ) -> None:
        """One backward: what ranks had, and what came of it, of which each rank tells a share."""
        squares = {rank: local.square(rank) for rank in local.ranks}
        values = {rank: math.sqrt(square) for rank, square in squares.items() if square is not None}
        together = None if reduced is None else reduced.square()
        if together is not None:
            values[REDUCED] = math.sqrt(together)
        if off_mean is not None and math.isfinite(off_mean):
            values[OFF_MEAN] = off_mean
        _raise(self.points.setdefault(step // self.every, {}), values)
        while len(self.points) > self.room:
            self._halve()

    @property
    def room(self) -> int:
        return max(LEAST_POINTS, min(MOST_POINTS, MOST_NUMBERS // (self.ranks + 2)))

    def _halve(self) -> None:
        halved: dict[int, Point] = {}
        for number, point in self.points.items():
            _raise(halved.setdefault(number // 2, {}), point)
        self.points = halved
        self.every *= 2


def _raise(point: Point, values: Mapping[int, float]) -> None:
    for key, value in values.items():
        point[key] = max(point.get(key, value), value)
