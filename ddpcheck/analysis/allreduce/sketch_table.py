"""The sketches of one backward, all ranks' side by side: one row a rank, one column a parameter.

A thousand ranks of a hundred parameters have as many sketches in each step, so none is taken out by itself: a column is
cut from the bytes of all rows at once, and what the mean check asks of it is summed up in as few calls as possible.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from operator import mul

from ddpcheck.records.sketch_codec import ITEM_BYTES, OF_CODE, Packed, unpack_one, unwrap

_NO_NUMBER = 255
_UNITS = tuple(code.unit for code in OF_CODE)
_SQUARES = tuple(code.norm * code.norm_low for code in OF_CODE)

# How many ranks had which norm, the largest first; those without a gradient, or with zeros, are not in it.
Norms = tuple[tuple[float, int], ...]


class Parts:
    """What all ranks put into one reduced gradient, summed up."""

    __slots__ = ("error", "known", "nonfinite", "norm", "norms", "partial", "ranks", "value")

    def __init__(
        self, value: float, error: float, norms: Norms, known: bool = True, nonfinite: bool = False
    ) -> None:
        self.value, self.error = value, error
        self.norms = norms
        # Whether all are known; and whether some had values that are not finite.
        self.known, self.nonfinite = known, nonfinite
        # How many ranks had a gradient, and the sum of their norms.
        self.ranks, self.norm = 0, 0.0
        # Every addition rounds its own result. Results are longest when the ranks come one after the other, largest
        # first: the sum of all of them but the first, which is none, and the last, which is the reduced gradient.
        self.partial = 0.0
        for norm, count in norms:
            self.partial += self.norm * count + norm * (count * (count + 1) / 2)
            self.ranks += count
            self.norm += norm * count
        self.partial = self.partial - norms[0][0] - self.norm if self.ranks > 2 else 0.0

    def without(self, left: Packed) -> Parts:
        """All but one rank's."""
        if not self.known or not left.norm:
            return self
        norms = tuple((norm, count - (norm == left.norm)) for norm, count in self.norms)
        kept = tuple((norm, count) for norm, count in norms if count)
        return Parts(self.value - left.value, self.error - left.error, kept)


NOTHING = Parts(0.0, 0.0, ())


def parts_of(ranks: Iterable[Packed]) -> Parts:
    """Of a few sketches that are at hand one by one."""
    some = [packed for packed in ranks if packed.norm]
    counts: dict[float, int] = {}
    for packed in some:
        counts[packed.norm] = counts.get(packed.norm, 0) + 1
    return Parts(
        value=math.fsum(packed.value for packed in some if packed.known),
        error=math.fsum(packed.error for packed in some if packed.known),
        norms=tuple(sorted(counts.items(), reverse=True)),
        known=all(packed.known for packed in some),
        nonfinite=any(packed.nonfinite for packed in some),
    )


class SketchTable:
    """Made of the texts of all ranks; ValueError where one is damaged."""

    def __init__(self, texts: Mapping[int, str]) -> None:
        self._rows = {rank: unwrap(text) for rank, text in texts.items()}
        longest = max(map(len, self._rows.values()), default=0)
        # Shorter rows end in zeros, which add nothing to a mean.
        self._bytes = b"".join(row.ljust(longest, b"\0") for row in self._rows.values())
        self._width = longest

    def __len__(self) -> int:
        """Columns."""
        return self._width // ITEM_BYTES

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._rows))

    def any_gradient(self, rank: int) -> bool:
        return any(self._codes(rank))

    def all_known(self, rank: int) -> bool:
        return _NO_NUMBER not in self._codes(rank)

    def row(self, rank: int) -> list[Packed]:
        size = len(self._rows.get(rank, b""))
        return [self._at(rank, place) for place in range(size // ITEM_BYTES)]

    def at(self, rank: int, place: int) -> Packed | None:
        """None where the rank has no such column."""
        return self._at(rank, place) if ITEM_BYTES * place < len(self._rows[rank]) else None

    def square(self, rank: int | None = None) -> float | None:
        """Of the norm of all the rank's gradients together, or of all ranks'. Each norm is known between two bounds,
        a factor of 1.4 apart: the middle of them is taken."""
        codes = self._bytes[::ITEM_BYTES] if rank is None else self._codes(rank)
        if not codes or _NO_NUMBER in codes:
            return None
        return math.fsum(map(_SQUARES.__getitem__, codes))

    def parts(self, place: int) -> Parts:
        """One column summed up."""
        begin = ITEM_BYTES * place
        codes = self._bytes[begin :: self._width]
        if _NO_NUMBER in codes:
            return parts_of(self._at(rank, place) for rank in self._rows if self.at(rank, place) is not None)
        steps = bytearray(4 * len(codes))
        for byte in range(4):
            steps[byte::4] = self._bytes[begin + 1 + byte :: self._width]
        found = sorted(((code, codes.count(code)) for code in set(codes) if code), reverse=True)
        return Parts(
            value=math.fsum(map(mul, _signed(steps), map(_UNITS.__getitem__, codes))),
            error=sum([OF_CODE[code].error * count for code, count in found]),
            norms=tuple([(OF_CODE[code].norm, count) for code, count in found]),
        )

    def _codes(self, rank: int) -> bytes:
        return self._rows[rank][::ITEM_BYTES]

    def _at(self, rank: int, place: int) -> Packed:
        return unpack_one(self._rows[rank][ITEM_BYTES * place : ITEM_BYTES * (place + 1)])


def _signed(little_endian: bytearray) -> array[int]:
    numbers = array("i")
    numbers.frombytes(little_endian)
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers


_BIG_ENDIAN = array("i", [1]).tobytes()[0] == 0
