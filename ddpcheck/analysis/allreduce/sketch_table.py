"""The sketches of one backward as a table: one row per rank, one column per parameter.

A thousand ranks with a hundred parameters write 100,000 sketches per step, so none is decoded by itself: a column is
sliced from the bytes of all rows at once, and summed for the mean check in as few calls as possible.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from operator import mul

from ddpcheck.records.codecs import ITEM_BYTES, OF_CODE, Packed, unpack_one, unwrap

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
    """Decoded from the records of all ranks; ValueError if one is damaged."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        self._rows = {rank: unwrap(text) for rank, text in texts.items()}
        longest = max(map(len, self._rows.values()), default=0)
        # Shorter rows are padded with zeros, which add nothing to a mean.
        self._bytes = b"".join(row.ljust(longest, b"\0") for row in self._rows.values())
        self._width = longest

    def __len__(self) -> int:
        """The number of columns."""
        return self._width // ITEM_BYTES

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._rows))

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

    def parts(self, index: int) -> Parts:
        """The sum of one column."""
        begin = ITEM_BYTES * index
        codes = self._bytes[begin :: self._width]
        if _NOT_FINITE in codes:
            return parts_of(self._at(rank, index) for rank in self._rows if self.at(rank, index) is not None)
        steps = bytearray(4 * len(codes))
        for byte in range(4):
            steps[byte::4] = self._bytes[begin + 1 + byte :: self._width]
        counts = sorted(((code, codes.count(code)) for code in set(codes) if code), reverse=True)
        return Parts(
            value=math.fsum(map(mul, _signed(steps), map(_UNITS.__getitem__, codes))),
            error=sum([OF_CODE[code].error * count for code, count in counts]),
            norms=tuple([(OF_CODE[code].norm, count) for code, count in counts]),
        )

    def _codes(self, rank: int) -> bytes:
        return self._rows[rank][::ITEM_BYTES]

    def _at(self, rank: int, index: int) -> Packed:
        return unpack_one(self._rows[rank][ITEM_BYTES * index : ITEM_BYTES * (index + 1)])


def _signed(little_endian: bytearray) -> array[int]:
    numbers = array("i")
    numbers.frombytes(little_endian)
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers
