"""Finds ranks whose gradients are missing from the mean, below the rounding bound of a single reduction.

The rounding bound grows with the number of ranks, and the share of one rank shrinks. But a missing rank is missing in
every parameter and at every step, while rounding errors are unrelated to any rank's gradients. So the errors of the
last steps are regressed on the local sketches of each rank: without a fault the coefficient is zero within its own
standard error, for a missing rank it is -1/W. See docs/gradients.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpcheck.records.codecs import OF_CODE

if TYPE_CHECKING:
    import numpy

    from ddpcheck.analysis.allreduce.mean_check import Compared, SketchTable

    Array = numpy.ndarray[Any, Any]

# With fewer ranks, the rounding bound of a single step is small enough, and too few ranks show what is usual.
FEWEST_RANKS = 8
# Steps that are evaluated together, up to the last one.
WINDOWS = (2, 5, 10, 20)
# Of a normal variable. The probability of a false alarm is 2e-19 per rank, window and step.
_DEVIATIONS = 9.0
# How far an estimated coefficient may be from that of a rank that is missing or counted twice.
_TOLERANCE = 0.35
# The same for each half of a window: a missing rank is missing at all times.
_HALF_TOLERANCE = 0.6
# The regression estimates two coefficients; the rest of the independent observations estimates the noise.
_COEFFICIENTS = 2
_FEWEST_FREE = 4
# A rank cannot be distinguished if its sketches are nearly proportional to the mean.
_LEAST_OWN_SHARE = 1e-6
# Elements below this many roundoffs of a partial sum may vanish in it: rounding then removes a rank's gradient.
_VISIBLE = 2.0
# Reductions that were seen before are not new evidence: a job with a learning rate of zero repeats them.
_MOST_REMEMBERED = 1024
_MOST_NAMED = 64


@dataclass(frozen=True)
class Contribution:
    """Ranks that do not enter the mean once."""

    # Empty: the result is smaller or larger than the mean by the share of one rank, and no rank is an outlier.
    ranks: tuple[int, ...]
    # Whether their gradients are missing or are added twice.
    missing: bool
    # First and last step of the window, and the reductions and parameters in it.
    first_step: int
    last_step: int
    reductions: int
    observations: int
    # Of the clearest rank: the share that enters the mean (0: missing, 1: right, 2: twice), and the deviation of a
    # normal variable that is as improbable without a fault.
    share: float
    deviations: float


@dataclass
class _Sums:
    """Weighted sums of products over parameters, and over steps: of the error, the mean, and each rank's sketches."""

    count: int
    # error * error, error * mean, mean * mean, and error * error of the step before for the same parameters.
    scalars: Array
    # One row each: own * own, own * mean, own * error; one column per rank.
    by_rank: Array

    def plus(self, other: _Sums) -> _Sums:
        return _Sums(self.count + other.count, self.scalars + other.scalars, self.by_rank + other.by_rank)


@dataclass(frozen=True)
class _Step:
    step: int
    sums: _Sums


class ContributionCheck:
    """Evaluates the latest reductions of one module. Its memory is a few numbers per rank and step of a window."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=max(WINDOWS))
        self._seen: deque[int] = deque(maxlen=_MOST_REMEMBERED)
        # By parameter, the error of the reduction before.
        self._before: dict[int, float] = {}

    def add(
        self,
        step: int,
        divisor: int,
        local: SketchTable,
        compared: Sequence[Compared],
        roundoffs: Sequence[float],
    ) -> Contribution | None:
        """`roundoffs`: of the dtypes in `compared`. The result of the latest reductions if ranks are missing."""
        import numpy

        usable = [
            (each, roundoff)
            for each, roundoff in zip(compared, roundoffs, strict=True)
            if each.parts.known and each.result.known and each.parts.norms and each.result.norm
        ]
        if not usable or len(local.ranks) < FEWEST_RANKS:
            return None
        results = numpy.array([each.result.value for each, _ in usable])
        key = hash((results.tobytes(), local.key()))
        if key in self._seen:
            return None
        self._seen.append(key)
        columns = numpy.array([each.parameter for each, _ in usable])
        means = numpy.array([each.parts.value for each, _ in usable]) / divisor
        squares = numpy.array(
            [math.fsum(n * n * count for n, count in each.parts.norms) for each, _ in usable]
        )
        reduced = numpy.array([each.result.norm for each, _ in usable])
        # Rounding errors are proportional to the norms of partial sums.
        partial = numpy.maximum(reduced * divisor, numpy.sqrt(squares))
        unit = numpy.array([roundoff for _, roundoff in usable])
        scale = unit * partial / divisor
        values, norms = _columns(local, columns)
        own = numpy.where(norms >= _VISIBLE * unit * partial, values, 0.0) / scale
        errors, means = (results - means) / scale, means / scale
        before = numpy.array([self._before.get(int(column), 0.0) for column in columns])
        self._before = dict(zip(columns.tolist(), errors.tolist(), strict=True))
        scalars = numpy.array([errors @ errors, errors @ means, means @ means, errors @ before])
        by_rank = numpy.stack([(own * own).sum(axis=1), own @ means, own @ errors])
        self._steps.append(_Step(step, _Sums(len(usable), scalars, by_rank)))
        return self._evaluate(divisor, local.ranks_in_order)

    def _evaluate(self, divisor: int, ranks: Sequence[int]) -> Contribution | None:
        steps = [each for each in self._steps if each.sums.by_rank.shape[1] == len(ranks)]
        for window in WINDOWS:
            if window > len(steps):
                return None
            contribution = _find(steps[-window:], divisor, ranks)
            if contribution is not None:
                return contribution
        return None


def _columns(local: SketchTable, columns: Array) -> tuple[Array, Array]:
    """Values and norms, one row per rank."""
    import numpy

    items = numpy.frombuffer(local.packed, numpy.dtype([("code", "u1"), ("steps", "<i4")]))
    items = items.reshape(len(local.ranks_in_order), -1)[:, columns]
    units = numpy.array([code.unit for code in OF_CODE] + [0.0] * (256 - len(OF_CODE)))
    norms = numpy.array([code.norm for code in OF_CODE] + [0.0] * (256 - len(OF_CODE)))
    return items["steps"] * units[items["code"]], norms[items["code"]]


def _find(steps: Sequence[_Step], divisor: int, ranks: Sequence[int]) -> Contribution | None:
    import numpy

    half = len(steps) // 2
    parts = [_sum(steps[:half]), _sum(steps[half:])]
    total = parts[0].plus(parts[1])
    independent = _independent(total, max(each.sums.count for each in steps))
    if independent < _COEFFICIENTS + _FEWEST_FREE:
        return None
    for estimate, named in ((_of_ranks, True), (_of_mean, False)):
        errors, deviations = estimate(total, independent, divisor)
        for missing, sign in ((True, -1.0), (False, 1.0)):
            hit = (sign * deviations >= _DEVIATIONS) & (numpy.abs(errors - sign) <= _TOLERANCE)
            # Nearly always there is none, and the halves are not needed.
            if not hit.any():
                continue
            for sums in parts:
                hit &= numpy.abs(estimate(sums, independent, divisor)[0] - sign) <= _HALF_TOLERANCE
            if not hit.any():
                continue
            indices = numpy.flatnonzero(hit)
            indices = indices[numpy.argsort(-numpy.abs(deviations[indices]), kind="stable")][:_MOST_NAMED]
            return Contribution(
                ranks=tuple(sorted(ranks[int(index)] for index in indices)) if named else (),
                missing=missing,
                first_step=steps[0].step,
                last_step=steps[-1].step,
                reductions=len(steps),
                observations=total.count,
                share=1.0 + float(errors[indices[0]]),
                deviations=abs(float(deviations[indices[0]])),
            )
    return None


def _sum(steps: Sequence[_Step]) -> _Sums:
    total = steps[0].sums
    for each in steps[1:]:
        total = total.plus(each.sums)
    return total


def _independent(total: _Sums, parameters: int) -> float:
    """The number of independent observations: errors that persist from step to step are not new evidence."""
    squares, _, _, lagged = total.scalars
    persistence = min(max(lagged / squares, 0.0), 1.0) if squares else 1.0
    return max(
        float(total.count * (1 - persistence) / (1 + persistence)), float(min(parameters, total.count))
    )


def _of_ranks(total: _Sums, independent: float, divisor: int) -> tuple[Array, Array]:
    """For each rank: its coefficient in the error, times the divisor, and how improbable that is without a fault.

    The error is explained by the mean and by the rank's own sketches. The first allows for a divisor that counts the
    missing rank or not, and for rounding that is related to the mean.
    """
    import numpy

    squares, with_mean, means, _ = total.scalars
    own, own_mean, own_error = total.by_rank
    if not means or not squares:
        return numpy.zeros_like(own), numpy.zeros_like(own)
    remaining = own - own_mean * own_mean / means
    usable = remaining > _LEAST_OWN_SHARE * own
    remaining = numpy.where(usable, remaining, 1.0)
    coefficients = numpy.where(usable, (own_error - with_mean / means * own_mean) / remaining, 0.0)
    explained = coefficients**2 * remaining
    unexplained = squares - with_mean * with_mean / means - explained
    normal = _as_normal(coefficients, explained, unexplained, squares, independent - _COEFFICIENTS)
    # If the errors are related to the gradients of many ranks, being related to those of one means little.
    centre = numpy.median(normal)
    spread = 1.4826 * numpy.median(numpy.abs(normal - centre))
    return coefficients * divisor, (normal - centre) / max(1.0, float(spread))


def _of_mean(total: _Sums, independent: float, divisor: int) -> tuple[Array, Array]:
    """The same for the mean itself: without one of similar gradients, and still divided by their number, it shrinks."""
    import numpy

    squares, with_mean, means, _ = total.scalars
    if not means or not squares:
        return numpy.zeros(1), numpy.zeros(1)
    coefficients = numpy.array([with_mean / means])
    explained = coefficients**2 * means
    return coefficients * divisor, _as_normal(
        coefficients, explained, squares - explained, squares, independent - 1
    )


def _as_normal(
    coefficients: Array, explained: Array, unexplained: Array, squares: float, free: float
) -> Array:
    """A variable of Student's distribution with `free` degrees of freedom as a normal one (Wallace)."""
    import numpy

    ratios = explained / numpy.maximum(unexplained, 1e-12 * squares)
    return numpy.copysign(
        numpy.sqrt(free * numpy.log1p(ratios)) * ((8 * free + 1) / (8 * free + 3)), coefficients
    )
