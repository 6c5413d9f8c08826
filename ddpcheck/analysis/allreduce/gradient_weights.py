"""How much each rank's gradients count in the mean: ranks that contribute zeros, or all gradients of another size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from ddpcheck.analysis.allreduce.mean_check import SketchTable

# The first backwards show it, and a norm is known to within a factor of 1.4 only.
MOST_BACKWARDS = 64
FEWEST_BACKWARDS = 8
MOST_RANKS = 64
# Evenly spread.
MOST_PARAMETERS = 64
# Powers of two: how far apart ranks are, and how far parameters and times may be for one common factor.
LEAST_FACTOR = 0.9
MOST_SPREAD = 0.75
MOST_DRIFT = 0.5


@dataclass
class GradientWeights:
    """Of one module; backwards in which every rank contributed."""

    backwards: int = 0
    # Backwards in which all gradients of a rank were zero and those of others were not.
    zero: Counter[int] = field(default_factory=Counter)
    # By rank, for each backward the distance of every parameter's norm from that of the other ranks, as a power of two.
    _distances: dict[int, list[list[float | None]]] = field(default_factory=dict)

    def add(self, local: SketchTable) -> None:
        ranks = local.ranks
        self.backwards += 1
        silent = [rank for rank in ranks if not local.any_gradient(rank)]
        if silent and len(silent) < len(ranks):
            self.zero.update(silent)
        if silent or len(ranks) > MOST_RANKS or self.backwards > MOST_BACKWARDS:
            return
        norms = {rank: local.log_norms(rank, MOST_PARAMETERS) for rank in ranks}
        if len({len(row) for row in norms.values()}) > 1:
            return
        common = [_median(column) for column in zip(*norms.values(), strict=True)]
        for rank, own in norms.items():
            # The median of two is none of them, so each is compared with the other.
            others = common if len(ranks) > 2 else next(row for other, row in norms.items() if other != rank)
            self._distances.setdefault(rank, []).append(
                [
                    mine - theirs if mine is not None and theirs is not None else None
                    for mine, theirs in zip(own, others, strict=True)
                ]
            )

    def silent(self) -> tuple[int, ...]:
        """Ranks whose gradients were zero in nearly all backwards."""
        if self.backwards < FEWEST_BACKWARDS:
            return ()
        return tuple(sorted(rank for rank, count in self.zero.items() if count >= 0.9 * self.backwards))

    def factors(self) -> dict[int, float]:
        """Ranks whose gradients all differ from those of the others by about the same factor, from the beginning on."""
        factors = {rank: factor for rank, rows in self._distances.items() if (factor := _common_factor(rows))}
        # Of two ranks, each is the other's outlier. The larger one is named.
        if len(self._distances) == 2 and factors:
            return {max(factors, key=factors.__getitem__): max(factors.values())}
        return factors


def _median(norms: Sequence[float | None]) -> float | None:
    """None if a gradient is not known, or zero."""
    known = [norm for norm in norms if norm is not None]
    return median(known) if len(known) == len(norms) else None


def _common_factor(rows: list[list[float | None]]) -> float | None:
    if len(rows) < FEWEST_BACKWARDS:
        return None
    by_parameter = [[value for value in column if value is not None] for column in zip(*rows, strict=False)]
    known = [column for column in by_parameter if len(column) >= FEWEST_BACKWARDS]
    if len(known) < 2:
        return None
    means = [fmean(column) for column in known]
    whole, first = fmean(means), fmean([fmean(column[: FEWEST_BACKWARDS // 2]) for column in known])
    if abs(whole) < LEAST_FACTOR or max(means) - min(means) > MOST_SPREAD or abs(whole - first) > MOST_DRIFT:
        return None
    return float(2.0**whole)
