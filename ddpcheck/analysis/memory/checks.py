"""Does memory grow without end? Only growth that is steady, large and not slowing down counts.

Memory of a healthy job grows too: in the first steps, as libraries load and allocators learn the sizes, and
later in jumps, or ever more slowly, as longer inputs come by. What is asked of a leak is that eight stretches of
the job, after its warm-up, each hold clearly more than the one before, the later ones as much as the earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ddpcheck.analysis.timeseries.series import Series

LEAST_STEPS = 60
# Left out at the beginning: this share, and no fewer than this many steps.
WARM_UP_SHARE, WARM_UP_STEPS = 0.2, 10
STRETCHES = 8
LEAST_TOTAL = 64 << 20
LEAST_SHARE = 0.05
LEAST_A_STEP = 4 << 10
# Each stretch must add this share of what stretches add on average, and the second half of the first's.
STEADY = 0.25
NOT_SLOWING = 0.6


@dataclass(frozen=True)
class Growth:
    """From one step to another."""

    first_step: int
    last_step: int
    first: int
    last: int

    @property
    def total(self) -> int:
        return self.last - self.first

    @property
    def per_step(self) -> float:
        return self.total / (self.last_step - self.first_step)


def growth_of(series: Series) -> Growth | None:
    """None where it is not sure."""
    if not len(series) or series.steps[-1] + 1 < LEAST_STEPS:
        return None
    end = series.steps[-1]
    begin = max(WARM_UP_STEPS, WARM_UP_SHARE * (end + 1))
    width = (end - begin) / STRETCHES
    levels = [
        series.median(begin + number * width, begin + (number + 1) * width) for number in range(STRETCHES)
    ]
    if not _steady(levels):
        return None
    first, last = begin + width / 2, end - width / 2
    growth = Growth(round(first), round(last), round(levels[0]), round(levels[-1]))
    enough = growth.total >= max(LEAST_TOTAL, LEAST_SHARE * levels[0]) and growth.per_step >= LEAST_A_STEP
    return growth if enough else None


def _steady(levels: list[float]) -> bool:
    added = [after - before for before, after in pairwise(levels)]
    mean = sum(added) / len(added)
    half = len(added) // 2
    earlier, later = sum(added[:half]) / half, sum(added[-half:]) / half
    return mean > 0 and min(added) >= STEADY * mean and later >= NOT_SLOWING * earlier
