"""Sketches as text for records: five bytes each, in base 85; needs no torch to read."""

from __future__ import annotations

import base64
import math
import struct
from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .sketch import Sketch

# Half octaves where gradients live, coarser steps out to the ends of float64.
_HALF_OCTAVES = (
    *range(-2 * 1074, -2 * 150, 2 * 84),
    *range(-2 * 150, -2 * 60, 2 * 3),
    *range(-2 * 60, 2 * 30),
    *range(2 * 30, 2 * 130, 2 * 5),
    *range(2 * 130, 2 * 1024, 2 * 80),
)
_SCALES = (0.0, *(math.ldexp((1.0, math.sqrt(2.0))[half % 2], half // 2) for half in _HALF_OCTAVES))
# A norm as sketched may be off by this much.
_NORM_SLACK = 1 + 2.0**-12

# A signed sum is within a few norms: larger ones have a probability of 1e-12 even under the weakest bound.
LARGEST_RATIO = 32
_STEPS = 2**31 // LARGEST_RATIO

_ITEM = struct.Struct("<BI")
_SIGNED_ITEM = struct.Struct("<Bi")
_NO_NUMBER = 255


class Packed(NamedTuple):
    """A sketch as it comes back: the value to within `error`, the norm between two bounds."""

    value: float
    error: float
    norm: float
    norm_low: float
    nonfinite: int

    @property
    def known(self) -> bool:
        """False where values were non-finite, or too large for a sketch."""
        return math.isfinite(self.norm)


def pack(sketches: Iterable[Sketch]) -> str:
    """Sketches in their order as text without quotes, backslashes or spaces."""
    return base64.b85encode(b"".join(map(_pack_one, sketches))).decode("ascii")


def unpack(text: str) -> list[Packed]:
    """What `pack` was given, rounded; ValueError for a text that is none of its own."""
    data = base64.b85decode(text)
    if len(data) % _ITEM.size:
        raise ValueError(f"{len(data)} bytes hold no whole number of sketches")
    return [_unpack_one(data[at : at + _ITEM.size]) for at in range(0, len(data), _ITEM.size)]


def _pack_one(sketch: Sketch) -> bytes:
    if sketch.nonfinite or not math.isfinite(sketch.value):
        return _ITEM.pack(_NO_NUMBER, min(sketch.nonfinite, 2**32 - 1))
    # Squares of the smallest float64 vanish and take the norm with them.
    norm = max(sketch.norm, abs(sketch.value)) if sketch.norm < 1e-150 else sketch.norm
    code = bisect_left(_SCALES, norm * _NORM_SLACK)
    if code >= len(_SCALES):
        return _ITEM.pack(_NO_NUMBER, 0)
    scale = _SCALES[code]
    steps = round(sketch.value / scale * _STEPS) if scale else 0
    if abs(steps) >= 2**31:
        return _ITEM.pack(_NO_NUMBER, 0)
    return _SIGNED_ITEM.pack(code, steps)


def _unpack_one(item: bytes) -> Packed:
    code, steps = _SIGNED_ITEM.unpack(item)
    if code == _NO_NUMBER:
        return Packed(math.nan, math.inf, math.inf, 0.0, _ITEM.unpack(item)[1])
    if code >= len(_SCALES):
        raise ValueError(f"{code} is no code of a norm")
    if not code:
        return Packed(0.0, 0.0, 0.0, 0.0, 0)
    scale = _SCALES[code]
    low = _SCALES[code - 1] / _NORM_SLACK**2
    return Packed(steps / _STEPS * scale, scale / _STEPS / 2 + _SCALES[1], scale, low, 0)
