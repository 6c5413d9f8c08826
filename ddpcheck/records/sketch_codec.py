"""Sketches as text for records: five bytes each, in base 85; needs no torch to read."""

from __future__ import annotations

import base64
import math
import struct
from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ddpcheck.probes.sketches.base85 import decode85

if TYPE_CHECKING:
    from ddpcheck.probes.sketches.sketch import Sketch

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
ITEM_BYTES = _ITEM.size
_NO_NUMBER = 255
_CODES = bytes(range(len(_SCALES))) + bytes([_NO_NUMBER])


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


class OfCode(NamedTuple):
    """What the first byte of a sketch tells: the norm's bounds, the value's error, and the value of one step."""

    norm: float
    error: float
    norm_low: float
    unit: float


def _of_code(code: int) -> OfCode:
    if not code:
        return OfCode(0.0, 0.0, 0.0, 0.0)
    scale, low = _SCALES[code], _SCALES[code - 1] / _NORM_SLACK**2
    return OfCode(scale, scale / _STEPS / 2 + _SCALES[1], low, scale / _STEPS)


OF_CODE = tuple(map(_of_code, range(len(_SCALES))))


def pack(sketches: Iterable[Sketch]) -> str:
    """Sketches in their order as text without quotes, backslashes or spaces."""
    return base64.b85encode(b"".join(map(_pack_one, sketches))).decode("ascii")


def unpack(text: str) -> list[Packed]:
    """What `pack` was given, rounded; ValueError for a text that is none of its own."""
    data = unwrap(text)
    return [unpack_one(data[at : at + ITEM_BYTES]) for at in range(0, len(data), ITEM_BYTES)]


def unwrap(text: str) -> bytes:
    """The bytes behind a text of sketches, known to be sound: `ITEM_BYTES` each."""
    data = decode85(text)
    if len(data) % ITEM_BYTES:
        raise ValueError(f"{len(data)} bytes hold no whole number of sketches")
    if strange := data[::ITEM_BYTES].translate(None, _CODES):
        raise ValueError(f"{strange[0]} is no code of a norm")
    return data


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


def unpack_one(item: bytes) -> Packed:
    """One sketch of those behind a text."""
    code, steps = _SIGNED_ITEM.unpack(item)
    if code == _NO_NUMBER:
        return Packed(math.nan, math.inf, math.inf, 0.0, _ITEM.unpack(item)[1])
    scale, error, low, _ = OF_CODE[code]
    return Packed(steps / _STEPS * scale, error, scale, low, 0)
