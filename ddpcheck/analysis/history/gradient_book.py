"""Norms of gradients over the steps: once there are too many points, two become one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpcheck.probes.sketches.packing import Packed

# Numbers kept for all ranks together, and points of each series within that.
MOST_NUMBERS = 24_000
MOST_POINTS = 1024
LEAST_POINTS = 16

# Rank's own norms by rank; REDUCED and OFF_MEAN are series of their own.
REDUCED = -1
OFF_MEAN = -2
Point = dict[int, float]


@dataclass
class GradientBook:
    """One module's."""

    ranks: int
    every: int = 1
    # By number of the stretch of `every` steps; the largest of each.
    points: dict[int, Point] = field(default_factory=dict)

    def note(
        self,
        step: int,
        local: Mapping[int, Sequence[Packed]],
        reduced: Mapping[int, Sequence[Packed]],
        off_mean: float | None,
    ) -> None:
        """One backward: what ranks had, and what came of it, of which each rank tells a share."""
        values = {rank: norm for rank, sketches in local.items() if (norm := _norm(sketches)) is not None}
        together = _norm([sketch for sketches in reduced.values() for sketch in sketches])
        if together is not None:
            values[REDUCED] = together
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


def _norm(sketches: Sequence[Packed]) -> float | None:
    """Each norm is known between two bounds, a factor of 1.4 apart: the middle of them is taken."""
    if not sketches or not all(sketch.known for sketch in sketches):
        return None
    return math.sqrt(math.fsum(sketch.norm * sketch.norm_low for sketch in sketches))
