"""Checks with sketches whether a reduced gradient is the mean of the local ones; see docs/gradients.md."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, NamedTuple

from ddpcheck.records.codecs import ITEM_BYTES, OF_CODE, Packed, unpack_one, unwrap
from ddpcheck.records.sketch_signs import BLOCK, LARGEST_WEIGHT

_NOT_FINITE = 255
_BIG_ENDIAN = array("i", [1]).tobytes()[0] == 0
_UNITS = tuple(code.unit for code in OF_CODE)
_SQUARES = tuple(code.norm * code.norm_low for code in OF_CODE)

# Norms and how many ranks have each, the largest first; ranks without a gradient, or with zeros, do not count.
Norms = tuple[tuple[float, int], ...]


class Parts:
    """The local gradients of all ranks for one reduced gradient, summed."""

    __slots__ = ("error", "known", "nonfinite", "norm", "norms", "partial", "ranks", "value")

    def __init__(
        self, value: float, error: float, norms: Norms, known: bool = True, nonfinite: bool = False
    ) -> None:
        self.value, self.error = value, error
        self.norms = norms
        # Whether all are known, and whether some have NaN or infinity.
        self.known, self.nonfinite = known, nonfinite
        # How many ranks have a gradient, and the sum of their norms.
        self.ranks, self.norm = 0, 0.0
        # Every addition rounds its result. The partial sums have the largest norms if ranks are added one by one,
        # largest first. This is the sum of these norms without the first (no addition) and the last (the result).
        self.partial = 0.0
        for norm, count in norms:
            self.partial += self.norm * count + norm * (count * (count + 1) / 2)
            self.ranks += count
            self.norm += norm * count
        self.partial = self.partial - norms[0][0] - self.norm if self.ranks > 2 else 0.0

    def without(self, own: Packed) -> Parts:
        """The sum without one rank's gradient."""
        if not self.known or not own.norm:
            return self
        norms = tuple((norm, count - (norm == own.norm)) for norm, count in self.norms)
        kept = tuple((norm, count) for norm, count in norms if count)
        return Parts(self.value - own.value, self.error - own.error, kept)


NOTHING = Parts(0.0, 0.0, ())


def parts_of(ranks: Iterable[Packed]) -> Parts:
    """The sum of a few decoded sketches."""
    nonzero = [packed for packed in ranks if packed.norm]
    counts: dict[float, int] = {}
    for packed in nonzero:
        counts[packed.norm] = counts.get(packed.norm, 0) + 1
    return Parts(
        value=math.fsum(packed.value for packed in nonzero if packed.known),
        error=math.fsum(packed.error for packed in nonzero if packed.known),
        norms=tuple(sorted(counts.items(), reverse=True)),
        known=all(packed.known for packed in nonzero),
        nonfinite=any(packed.nonfinite for packed in nonzero),
    )


class SketchTable:
    """The sketches of one backward: one row per rank, one column per parameter; ValueError if a record is damaged.

    A thousand ranks with a hundred parameters write 100,000 sketches per step, so none is decoded by itself: a column
    is sliced from the bytes of all rows at once, and summed for the mean check in as few calls as possible.
    """

    def __init__(self, texts: Mapping[int, str] | Mapping[int, bytes]) -> None:
        self._rows = {rank: unwrap(text) for rank, text in texts.items()}
        longest = max(map(len, self._rows.values()), default=0)
        # Shorter rows are padded with zeros, which add nothing to a mean.
        self._bytes = b"".join(row.ljust(longest, b"\0") for row in self._rows.values())
        self._width = longest
        self._sums: tuple[Any, Any, Any] | None = None

    def __len__(self) -> int:
        """The number of columns."""
        return self._width // ITEM_BYTES

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._rows))

    @property
    def ranks_in_order(self) -> tuple[int, ...]:
        """The ranks in the order of the rows."""
        return tuple(self._rows)

    @property
    def packed(self) -> bytes:
        """All rows, one after the other, padded to the same length."""
        return self._bytes

    def all_different(self) -> bool:
        """Whether no two ranks have the same sketches."""
        return len(set(self._rows.values())) == len(self._rows)

    def packed_row(self, rank: int) -> bytes:
        return self._rows[rank]

    def key(self) -> int:
        """Equal for equal tables."""
        return hash(self._bytes)

    def any_gradient(self, rank: int) -> bool:
        return any(self._codes(rank))

    def all_known(self, rank: int) -> bool:
        return _NOT_FINITE not in self._codes(rank)

    def row(self, rank: int) -> list[Packed]:
        size = len(self._rows.get(rank, b""))
        return [self._at(rank, index) for index in range(size // ITEM_BYTES)]

    def at(self, rank: int, index: int) -> Packed | None:
        """None if the rank has no such column."""
        return self._at(rank, index) if ITEM_BYTES * index < len(self._rows[rank]) else None

    def square(self, rank: int | None = None) -> float | None:
        """The squared norm of all gradients of a rank, or of all ranks.

        Each norm is known between two bounds, a factor of 1.4 apart; their geometric mean is used.
        """
        codes = self._bytes[::ITEM_BYTES] if rank is None else self._codes(rank)
        if not codes or _NOT_FINITE in codes:
            return None
        return math.fsum(map(_SQUARES.__getitem__, codes))

    def log_norms(self, rank: int, most: int) -> list[float | None]:
        """Binary logarithms of some of the norms; None for zeros and for gradients that are not finite."""
        codes = self._codes(rank)
        codes = codes[:: -(-len(codes) // most)] if codes else codes
        return [
            math.log2(_SQUARES[code]) / 2 if code != _NOT_FINITE and _SQUARES[code] else None
            for code in codes
        ]

    def parts(self, index: int) -> Parts:
        """The sum of one column."""
        if len(self._rows) >= _FEWEST_FOR_ARRAYS:
            return self._parts_by_array(index)
        begin = ITEM_BYTES * index
        codes = self._bytes[begin :: self._width]
        if _NOT_FINITE in codes:
            return self._exact_parts(index)
        steps = bytearray(4 * len(codes))
        for byte in range(4):
            steps[byte::4] = self._bytes[begin + 1 + byte :: self._width]
        counts = sorted(((code, codes.count(code)) for code in set(codes) if code), reverse=True)
        return _parts_of_counts(
            math.fsum(map(mul, _signed(steps), map(_UNITS.__getitem__, codes))),
            counts,
        )

    def _exact_parts(self, index: int) -> Parts:
        return parts_of(self._at(rank, index) for rank in self._rows if self.at(rank, index) is not None)

    def _parts_by_array(self, index: int) -> Parts:
        if self._sums is None:
            self._sums = _sums_of(self._bytes, len(self._rows))
        values, counts, usable = self._sums
        if not usable[index]:
            return self._exact_parts(index)
        present = [(code, count) for code, count in enumerate(counts[index].tolist()) if code and count]
        return _parts_of_counts(float(values[index]), present[::-1])

    def squares(self) -> dict[int, float | None]:
        """`square` of each rank."""
        if len(self._rows) < _FEWEST_FOR_ARRAYS or not self._width:
            return {rank: self.square(rank) for rank in self.ranks}
        import numpy

        codes = numpy.frombuffer(self._bytes, "u1").reshape(len(self._rows), -1)[:, ::ITEM_BYTES]
        squares = numpy.array([*_SQUARES, *[math.nan] * (256 - len(_SQUARES))])[codes].sum(axis=1)
        known = zip(self._rows, squares.tolist(), strict=True)
        return {rank: None if math.isnan(square) else square for rank, square in sorted(known)}

    def _codes(self, rank: int) -> bytes:
        return self._rows[rank][::ITEM_BYTES]

    def _at(self, rank: int, index: int) -> Packed:
        return unpack_one(self._rows[rank][ITEM_BYTES * index : ITEM_BYTES * (index + 1)])


# Below this number of ranks, arrays take longer than loops.
_FEWEST_FOR_ARRAYS = 16


def _parts_of_counts(value: float, counts: Sequence[tuple[int, int]]) -> Parts:
    """`counts`: how many ranks have a norm of each code, the largest first."""
    return Parts(
        value=value,
        error=sum([OF_CODE[code].error * count for code, count in counts]),
        norms=tuple([(OF_CODE[code].norm, count) for code, count in counts]),
    )


def _sums_of(table: bytes, ranks: int) -> tuple[Any, Any, Any]:
    """By parameter: the sum of the values, how often each code occurs, and whether all are finite."""
    import numpy

    items = numpy.frombuffer(table, numpy.dtype([("code", "u1"), ("steps", "<i4")])).reshape(ranks, -1)
    codes = items["code"]
    units = numpy.array([*_UNITS, *[0.0] * (256 - len(_UNITS))])
    values = (items["steps"] * units[codes]).sum(axis=0)
    columns = codes.shape[1]
    positions = codes.astype(numpy.int64) + 256 * numpy.arange(columns)
    counts = numpy.bincount(positions.ravel(), minlength=256 * columns).reshape(columns, 256)
    return values, counts, (codes != _NOT_FINITE).all(axis=0)


def _signed(little_endian: bytearray) -> array[int]:
    numbers = array("i")
    numbers.frombytes(little_endian)
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers


# Allowed standard deviations of a sum under random signs: the probability of more is 6e-13.
_DEVIATIONS = 7.6
# The same for signs that repeat in every block, for any errors: 4e-13.
_MOST_DEVIATIONS = 32.0
# Additions that a term passes through in a sketch, each with an error of 2**-53. No summation of torch needs more.
_SKETCH_DEPTH = 512


@dataclass(frozen=True, slots=True)
class _Format:
    """The effect of a float format on a number: relative error, absolute error near zero, largest value."""

    roundoff: float
    underflow: float
    largest: float


# If the hardware flushes subnormal numbers, the error near zero is the smallest normal number.
_FORMATS = {
    # Norms lose values whose square underflows a float64, and overflow with values whose square does.
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
    """The measured error and the largest error that rounding explains. An infinite bound: nothing can be concluded."""

    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound

    @property
    def ratio(self) -> float:
        """Above 1 if rounding does not explain the error."""
        if math.isinf(self.bound) or not self.error:
            return 0.0
        return self.error / self.bound if self.bound else math.inf


_INCONCLUSIVE = MeanCheckResult(0.0, math.inf)
_WRONG = MeanCheckResult(math.inf, 0.0)


class Compared(NamedTuple):
    """One parameter of one backward: the local gradients of all ranks and the reduced one."""

    parts: Parts
    result: Packed
    dtype: str
    numel: int
    # Its index among the parameters.
    parameter: int


def can_check(dtype: str) -> bool:
    return _COMPLEX.get(dtype, dtype) in _FORMATS


def roundoff(dtype: str) -> float:
    """The largest relative error of one rounding."""
    return _FORMATS[_COMPLEX.get(dtype, dtype)].roundoff


def mean_check(
    local: Mapping[int, Packed], reduced: Packed, dtype: str, numel: int, divisor: int
) -> MeanCheckResult:
    """Compare the sum of the ranks' gradients over `divisor` with the result of the AllReduce.

    `local` holds every rank that contributed; ranks that contributed zeros may be missing.
    """
    return check_parts(parts_of(local.values()), reduced, dtype, numel, divisor)


def check_parts(parts: Parts, reduced: Packed, dtype: str, numel: int, divisor: float) -> MeanCheckResult:
    """`mean_check` for local gradients that are already summed."""
    number_format = _FORMATS[_COMPLEX.get(dtype, dtype)]
    reals = 2 * numel if dtype in _COMPLEX else numel
    if not reduced.known or not parts.known:
        return _check_nonfinite(parts, reduced, number_format)
    by_norm = _check_norm(parts, reduced, number_format, reals, divisor)
    by_value = _check_value(parts, reduced, number_format, reals, divisor)
    return by_value if by_norm.ok or by_value.ratio > by_norm.ratio else by_norm


class ActualResult(NamedTuple):
    """What a reduction returned instead of the mean."""

    # For messages; empty: unknown.
    phrase: str = ""
    # The rank that is missing.
    missing: int | None = None


def actual_result(compared: Sequence[Compared], local: SketchTable, group: Sequence[int]) -> ActualResult:
    """Without a phrase if no single mistake explains every parameter of the backward."""
    known = [each for each in compared if each.result.known and each.parts.norms]
    ranks = len(group)
    if not known:
        return ActualResult()
    for divisor, description in (
        (1, f"the sum of the ranks' gradients, not divided by {ranks}"),
        (ranks * ranks, f"the mean of the ranks' gradients divided by {ranks} again: divided twice"),
    ):
        if _explains(known, divisor):
            return ActualResult(description)
    for rank in local.ranks:
        for divisor in (ranks, ranks - 1):
            if _explains(known, divisor, rank, local):
                return ActualResult(f"the sum without rank {rank}, divided by {divisor}", rank)
    return ActualResult()


def _explains(
    compared: Sequence[Compared], divisor: int, missing: int | None = None, local: SketchTable | None = None
) -> bool:
    """Whether every result is the sum of the ranks' gradients, without rank `missing`, over `divisor`."""
    for each in compared:
        parts = each.parts
        if local is not None and missing is not None:
            own = local.at(missing, each.parameter)
            parts = parts if own is None else parts.without(own)
        if not check_parts(parts, each.result, each.dtype, each.numel, divisor).ok:
            return False
    return True


def _check_value(
    parts: Parts, reduced: Packed, number_format: _Format, reals: int, divisor: float
) -> MeanCheckResult:
    mean = parts.value / divisor
    encoding = parts.error / divisor + reduced.error
    norms = parts.norm / divisor + reduced.norm
    sketching = _SKETCH_DEPTH * 2.0**-53 * LARGEST_WEIGHT * math.sqrt(reals) * norms
    rounding = _deviations(reals) * _rounding(parts, reduced.norm, number_format, reals, divisor)
    return MeanCheckResult(abs(reduced.value - mean), rounding + encoding + sketching)


def _check_norm(
    parts: Parts, reduced: Packed, number_format: _Format, reals: int, divisor: float
) -> MeanCheckResult:
    """The norm of a mean is at most the mean of the norms. This detects errors that random signs may cancel."""
    limit = parts.norm / divisor
    return MeanCheckResult(reduced.norm_low, limit + _rounding(parts, limit, number_format, reals, divisor))


def _rounding(parts: Parts, reduced_norm: float, number_format: _Format, reals: int, divisor: float) -> float:
    """The largest norm of the rounding errors of a scaled sum, for any order of additions."""
    total = parts.norm / divisor
    # Multiplying by a rounded 1/n adds two errors; a power of two adds none.
    scaling = 0.0 if math.frexp(divisor)[0] == 0.5 else 2 * total
    last = min(reduced_norm, total) if parts.ranks > 1 else 0.0
    growth = (1 + number_format.roundoff) ** (parts.ranks + 1)
    relative = number_format.roundoff * growth * (scaling + parts.partial / divisor + last)
    return relative + 2 * parts.ranks * number_format.underflow * math.sqrt(reals)


def _deviations(reals: int) -> float:
    blocks = -(-reals // BLOCK)
    if blocks <= 1:
        return _DEVIATIONS
    return LARGEST_WEIGHT * min(_DEVIATIONS * math.sqrt(blocks), _MOST_DEVIATIONS)


def _check_nonfinite(parts: Parts, reduced: Packed, number_format: _Format) -> MeanCheckResult:
    """NaN and infinity pass through an AllReduce. It creates them only if a sum overflows."""
    if reduced.known:
        return _WRONG if parts.nonfinite else _INCONCLUSIVE
    # A rank of unknown norm makes this sum infinite.
    could_overflow = parts.norm >= number_format.largest / 2
    return _INCONCLUSIVE if could_overflow else _WRONG
