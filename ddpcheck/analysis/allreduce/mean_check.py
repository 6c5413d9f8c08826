"""Whether a reduced gradient is the mean of the ranks' own, told from sketches; see docs/gradients.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddpcheck.analysis.allreduce.sketch_table import Parts, SketchTable, parts_of
from ddpcheck.records.sketch_codec import Packed
from ddpcheck.records.sketch_signs import BLOCK, LARGEST_WEIGHT

# How many standard deviations of a sum under random signs are allowed: beyond it lies a probability of 6e-13.
_DEVIATIONS = 7.6
# The same for signs that come again in every block, whatever the errors: 4e-13.
_DEVIATIONS_AT_MOST = 32.0
# Additions a term passes through in a sketch, more than any of torch's summations needs, each off by 2**-53.
_SKETCH_DEPTH = 512


@dataclass(frozen=True, slots=True)
class _Format:
    """What a float format does to a number: relative error, absolute error near zero, largest value."""

    roundoff: float
    underflow: float
    largest: float


# Where hardware may flush subnormal numbers, a whole smallest normal number can be lost.
_FORMATS = {
    # Norms lose what is so small, and overflow with what is so large, that its square is no float64.
    "float64": _Format(2.0**-53, 1e-150, 1e150),
    "float32": _Format(2.0**-24, 2.0**-126, 3.4028234663852886e38),
    "bfloat16": _Format(2.0**-8, 2.0**-126, 3.3895313892515355e38),
    "float16": _Format(2.0**-11, 2.0**-25, 65504.0),
    "float8_e4m3fn": _Format(2.0**-4, 2.0**-10, 448.0),
    "float8_e4m3fnuz": _Format(2.0**-4, 2.0**-11, 240.0),
    "float8_e5m2": _Format(2.0**-3, 2.0**-17, 57344.0),
    "float8_e5m2fnuz": _Format(2.0**-3, 2.0**-18, 57344.0),
}
_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True, slots=True)
class MeanCheckResult:
    """What was measured against what rounding can explain. An infinite bound: nothing could be told."""

    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """Above 1 where rounding is no excuse."""
        if math.isinf(self.bound) or not self.error:
            return 0.0
        return self.error / self.bound if self.bound else math.inf


NOTHING_TO_TELL = MeanCheckResult(0.0, math.inf)


def can_check(dtype: str) -> bool:
    return _COMPLEX.get(dtype, dtype) in _FORMATS


def mean_check(
    local: Mapping[int, Packed], reduced: Packed, dtype: str, numel: int, divisor: int
) -> MeanCheckResult:
    """Compare the sum of the ranks' gradients over `divisor` with what the AllReduce returned.

    `local` holds every rank that contributed; those that contributed zeros may be left out.
    """
    return check_parts(parts_of(local.values()), reduced, dtype, numel, divisor)


def check_parts(parts: Parts, reduced: Packed, dtype: str, numel: int, divisor: int) -> MeanCheckResult:
    """The same of gradients that are summed up already."""
    number = _FORMATS[_COMPLEX.get(dtype, dtype)]
    reals = 2 * numel if dtype in _COMPLEX else numel
    if not reduced.known or not parts.known:
        return _nonfinite(parts, reduced, number)
    by_norm = _check_norm(parts, reduced, number, reals, divisor)
    by_value = _check_value(parts, reduced, number, reals, divisor)
    return by_value if by_norm.ok or by_value.ratio > by_norm.ratio else by_norm


def _check_value(parts: Parts, reduced: Packed, number: _Format, reals: int, divisor: int) -> MeanCheckResult:
    mean = parts.value / divisor
    stored = parts.error / divisor + reduced.error
    norms = parts.norm / divisor + reduced.norm
    summed = _SKETCH_DEPTH * 2.0**-53 * LARGEST_WEIGHT * math.sqrt(reals) * norms
    rounding = _deviations(reals) * _rounding(parts, reduced.norm, number, reals, divisor)
    return MeanCheckResult(abs(reduced.value - mean), rounding + stored + summed)


def _check_norm(parts: Parts, reduced: Packed, number: _Format, reals: int, divisor: int) -> MeanCheckResult:
    """A mean is never longer than its parts together. This sees what random signs may happen to hide."""
    limit = parts.norm / divisor
    return MeanCheckResult(reduced.norm_low, limit + _rounding(parts, limit, number, reals, divisor))


def _rounding(parts: Parts, reduced_norm: float, number: _Format, reals: int, divisor: int) -> float:
    """The largest norm that the rounding errors of a scaled sum can have, in whatever order it was added."""
    total = parts.norm / divisor
    # Multiplying by a rounded 1/n makes two errors, a power of two none.
    scaling = 0.0 if divisor & (divisor - 1) == 0 else 2 * total
    last = min(reduced_norm, total) if parts.ranks > 1 else 0.0
    growth = (1 + number.roundoff) ** (parts.ranks + 1)
    relative = number.roundoff * growth * (scaling + parts.partial / divisor + last)
    return relative + 2 * parts.ranks * number.underflow * math.sqrt(reals)


def _deviations(reals: int) -> float:
    blocks = -(-reals // BLOCK)
    if blocks <= 1:
        return _DEVIATIONS
    return LARGEST_WEIGHT * min(_DEVIATIONS * math.sqrt(blocks), _DEVIATIONS_AT_MOST)


def _nonfinite(parts: Parts, reduced: Packed, number: _Format) -> MeanCheckResult:
    """NaN and infinity pass through an AllReduce, and come out of one only where a sum can overflow."""
    if reduced.known:
        return MeanCheckResult(math.inf, 0.0) if parts.nonfinite else NOTHING_TO_TELL
    # A rank of unknown norm makes this sum infinite.
    could_overflow = parts.norm >= number.largest / 2
    return NOTHING_TO_TELL if could_overflow else MeanCheckResult(math.inf, 0.0)


class Compared(NamedTuple):
    """One parameter of one backward: what every rank put in, and what came out."""

    parts: Parts
    result: Packed
    dtype: str
    numel: int
    place: int


def what_instead(compared: Sequence[Compared], local: SketchTable, group: Sequence[int]) -> str:
    """In words; empty where no single mistake explains every parameter of the backward."""
    telling = [each for each in compared if each.result.known and each.parts.norms]
    ranks = len(group)
    if not telling:
        return ""
    for divisor, words in (
        (1, f"the sum of the ranks' gradients, not divided by {ranks}"),
        (ranks * ranks, f"the mean of the ranks' gradients divided by {ranks} once more: divided twice"),
    ):
        if _explains(telling, divisor):
            return words
    for rank in local.ranks:
        for divisor in (ranks, ranks - 1):
            if _explains(telling, divisor, rank, local):
                return f"what the ranks computed without rank {rank}, divided by {divisor}"
    return ""


def _explains(
    telling: Sequence[Compared], divisor: int, left_out: int | None = None, local: SketchTable | None = None
) -> bool:
    """Whether every parameter is the sum of the ranks' gradients, but for one rank's, over `divisor`."""
    for each in telling:
        parts = each.parts
        if local is not None and left_out is not None:
            own = local.at(left_out, each.place)
            parts = parts if own is None else parts.without(own)
        if not check_parts(parts, each.result, each.dtype, each.numel, divisor).ok:
            return False
    return True
