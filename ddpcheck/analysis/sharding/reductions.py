"""Verifies reductions of sharded gradients: are the shards together the mean of the whole local gradients?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.analysis.allreduce.mean_check import (
    MeanCheckResult,
    Parts,
    can_check,
    check_parts,
    parts_of,
    roundoff,
)
from ddpcheck.records.codecs import Packed
from ddpcheck.records.kinds.shards import ReducedShardsRecord
from ddpcheck.records.sketch_signs import BLOCK, LARGEST_WEIGHT, weight

# Of a sketch without values: there was no gradient before.
NOTHING = Packed(0.0, 0.0, 0.0, 0.0, 0)


@dataclass(frozen=True)
class RankShard:
    """One rank's part in a reduction: its whole gradient, its shard of the result, and the shard before."""

    parameter: ReducedShardsRecord
    local: Packed
    reduced: Packed
    before: Packed


def check_reduction(shards: Mapping[int, RankShard]) -> MeanCheckResult | None:
    """None if nothing can be concluded: the result of a position is not known, or the dtype has no rounding bound."""
    parameter = next(iter(shards.values())).parameter
    dtype = coarsest(parameter.dtypes)
    by_position = _one_per_position(shards, parameter.shards)
    if dtype is None or by_position is None:
        return None
    parts = parts_of(shard.local for shard in shards.values())
    return _compare(parts, by_position, parameter, dtype, parameter.divisor)


def actual_result(reductions: Sequence[Mapping[int, RankShard]]) -> tuple[str, int | None]:
    """What all these reductions returned instead of the mean, and the rank that is missing from it."""
    first = next(iter(reductions[0].values())).parameter
    ranks = len(first.ranks)
    for divisor, phrase in (
        (first.divisor / ranks, f"the sum of the ranks' gradients, not divided by {ranks}"),
        (first.divisor * ranks, f"the mean of the ranks' gradients divided by {ranks} again: divided twice"),
    ):
        if all(_explains(each, divisor) for each in reductions):
            return phrase, None
    for missing in first.ranks:
        for divisor in (first.divisor, first.divisor * (ranks - 1) / ranks):
            if all(_explains(each, divisor, missing) for each in reductions):
                return f"the sum without rank {missing}, divided by {divisor:g}", missing
    return "", None


def _explains(shards: Mapping[int, RankShard], divisor: float, missing: int | None = None) -> bool:
    parameter = next(iter(shards.values())).parameter
    dtype, by_position = coarsest(parameter.dtypes), _one_per_position(shards, parameter.shards)
    if dtype is None or by_position is None:
        return False
    parts = parts_of(shard.local for rank, shard in shards.items() if rank != missing)
    outcome = _compare(parts, by_position, parameter, dtype, divisor)
    return bool(parts.norms) and outcome.ok and not math.isinf(outcome.bound)


def coarsest(dtypes: Iterable[str]) -> str | None:
    """The dtype with the largest rounding error; None if one is not known."""
    known = list(dtypes)
    return max(known, key=roundoff) if known and all(map(can_check, known)) else None


def _one_per_position(shards: Mapping[int, RankShard], count: int) -> list[RankShard] | None:
    """Replicas hold the same shard, which other rules compare: one of each is enough."""
    by_position = {shard.parameter.position: shard for _, shard in sorted(shards.items(), reverse=True)}
    return [by_position[position] for position in range(count)] if len(by_position) == count else None


def _compare(
    parts: Parts, by_position: Sequence[RankShard], parameter: ReducedShardsRecord, dtype: str, divisor: float
) -> MeanCheckResult:
    after = _together([shard.reduced for shard in by_position])
    before = _together([shard.before for shard in by_position])
    # The signs repeat in every shard, as in every block of a tensor.
    elements = max(parameter.numel, len(by_position) * BLOCK if len(by_position) > 1 else 0)
    result = after
    if before.norm and before.known and after.known:
        # The norm of a difference is not known.
        result = Packed(
            after.value - before.value, after.error + before.error, after.norm + before.norm, 0.0, 0
        )
    outcome = check_parts(parts, result, dtype, elements, divisor)
    if math.isinf(outcome.bound) or not math.isfinite(outcome.error):
        return outcome
    # Gradients are rounded to the dtype of the reduction before it, and the result to that of the parameter.
    casts = len(set(parameter.dtypes)) - 1
    extra = casts * 2 * parts.norm / divisor + (result.norm if before.norm else 0.0)
    spread = LARGEST_WEIGHT * 32.0
    return MeanCheckResult(outcome.error, outcome.bound + spread * roundoff(dtype) * extra)


def _together(shards: Sequence[Packed]) -> Packed:
    """The sketch of a whole gradient from those of its shards."""
    if not all(shard.known for shard in shards):
        return Packed(math.nan, math.inf, math.inf, 0.0, sum(shard.nonfinite for shard in shards))
    return Packed(
        math.fsum(weight(position) * shard.value for position, shard in enumerate(shards)),
        sum(LARGEST_WEIGHT * shard.error for shard in shards),
        math.hypot(*(shard.norm for shard in shards)),
        math.hypot(*(shard.norm_low for shard in shards)),
        0,
    )
