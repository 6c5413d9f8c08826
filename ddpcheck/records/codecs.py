"""Codecs of record fields: packed digests and samples, sketches as base 85, and which rank sketches which gradient."""

from __future__ import annotations

import base64
import binascii
import math
import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from ddpcheck.records.kinds.modules import ModuleRecord

if TYPE_CHECKING:
    from ddpcheck.probes.sketches.sketch import Sketch


def unpack_leaves(text: str, width: int) -> list[bytes]:
    """The digests of all tensors, `width` bytes each; an empty list where `text` cannot be decoded."""
    data = _decode(text)
    if width <= 0 or len(data) % width:
        return []
    return [data[offset : offset + width] for offset in range(0, len(data), width)]


def unpack_samples(text: str) -> list[bytes]:
    """The first bytes of each tensor."""
    data = _decode(text)
    samples: list[bytes] = []
    offset = 0
    while offset < len(data):
        size = data[offset]
        samples.append(data[offset + 1 : offset + 1 + size])
        offset += 1 + size
    return samples


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


@lru_cache(maxsize=64)
def distribute(sizes: tuple[int, ...], ranks: int) -> tuple[tuple[int, ...], ...]:
    """The parameter indices of each rank, with about equal total sizes: the slowest rank delays the others.

    Sizes must be considered: weights and biases alternate, so that every second index would give one of two ranks all
    the work.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    by_size = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    for turn, index in enumerate(by_size):
        round_number, position = divmod(turn, ranks)
        # Alternating direction: the rank with the largest of one round gets the smallest of the next.
        shares[ranks - 1 - position if round_number % 2 else position].append(index)
    return tuple(tuple(sorted(share)) for share in shares)


def shares(module: ModuleRecord) -> dict[int, tuple[int, ...]]:
    """The parameter indices of each rank of the group."""
    sizes = tuple(math.prod(row[2]) for row in module.parameters)
    return dict(zip(module.group, distribute(sizes, len(module.group)), strict=True))


def share_of(sizes: Sequence[int], rank: int, ranks: int) -> tuple[int, ...]:
    """The parameter indices of one rank. `rank`: its position in the group."""
    return distribute(tuple(sizes), ranks)[rank]


# The digits of base 85 in the order of their values: the last character of a small number is the digit itself.
ALPHABET_85 = base64.b85encode(b"".join(number.to_bytes(4, "big") for number in range(85)))[4::5]
_NO_DIGIT = 255


def _digits() -> bytes:
    table = bytearray([_NO_DIGIT]) * 256
    for number, digit in enumerate(ALPHABET_85):
        table[digit] = number
    return bytes(table)


_DIGITS = _digits()


@lru_cache(maxsize=64)
def _masks(words: int) -> tuple[int, int, int]:
    """Lanes of five bytes: the first and third byte of each, the first two, the first."""
    ones = int.from_bytes(b"\x01\0\0\0\0" * words, "little")
    return ones * 0xFF00FF, ones * 0xFFFF, ones * 0xFF


def decode85(text: str) -> bytes:
    """Like `base64.b85decode`, but faster. ValueError where `text` is not base 85."""
    given = text.encode("ascii")
    missing = -len(given) % 5
    digits = (given + b"~" * missing).translate(_DIGITS)
    if _NO_DIGIT in digits:
        raise ValueError("not base85: invalid character")
    words = len(digits) // 5
    singles, pairs, last = _masks(words)
    # In each lane the first digit is the lowest byte: two digits become one number, then four, then all five.
    lanes = int.from_bytes(digits, "little")
    twos = (lanes & singles) * 85 + ((lanes >> 8) & singles)
    fours = (twos & pairs) * 85**2 + ((twos >> 16) & pairs)
    numbers = (fours * 85 + ((lanes >> 32) & last)).to_bytes(5 * words, "little")
    if any(numbers[4::5]):
        raise ValueError("not base85: a group of five characters exceeds four bytes")
    data = bytearray(4 * words)
    for byte in range(4):
        data[byte::4] = numbers[3 - byte :: 5]
    return bytes(data[: len(data) - missing])


# Scales of norms: half octaves in the range of gradients, coarser steps up to the limits of float64.
_HALF_OCTAVES = (
    *range(-2 * 1074, -2 * 150, 2 * 84),
    *range(-2 * 150, -2 * 60, 2 * 3),
    *range(-2 * 60, 2 * 30),
    *range(2 * 30, 2 * 130, 2 * 5),
    *range(2 * 130, 2 * 1024, 2 * 80),
)
SCALES = (0.0, *(math.ldexp((1.0, math.sqrt(2.0))[half % 2], half // 2) for half in _HALF_OCTAVES))
# Relative error of a sketched norm.
NORM_SLACK = 1 + 2.0**-12

# A signed sum is at most a few norms: the probability of a larger ratio is below 1e-12 under the weakest bound.
LARGEST_RATIO = 32
STEPS = 2**31 // LARGEST_RATIO

_ITEM = struct.Struct("<BI")
_SIGNED_ITEM = struct.Struct("<Bi")
ITEM_BYTES = _ITEM.size
_NO_NUMBER = 255
_CODES = bytes(range(len(SCALES))) + bytes([_NO_NUMBER])


class Packed(NamedTuple):
    """An unpacked sketch: the value to within `error`, and bounds of the norm."""

    value: float
    error: float
    norm: float
    norm_low: float
    nonfinite: int

    @property
    def known(self) -> bool:
        """False where values were not finite, or too large for a sketch."""
        return math.isfinite(self.norm)


class SketchOfCode(NamedTuple):
    """The meaning of the first byte of a sketch: bounds of the norm, error of the value, and value of one step."""

    norm: float
    error: float
    norm_low: float
    unit: float


def _of_code(code: int) -> SketchOfCode:
    if not code:
        return SketchOfCode(0.0, 0.0, 0.0, 0.0)
    scale, low = SCALES[code], SCALES[code - 1] / NORM_SLACK**2
    return SketchOfCode(scale, scale / STEPS / 2 + SCALES[1], low, scale / STEPS)


OF_CODE = tuple(map(_of_code, range(len(SCALES))))


def pack(sketches: Iterable[Sketch]) -> str:
    """Pack sketches in order, as text without quotes, backslashes or spaces."""
    return base64.b85encode(b"".join(map(_pack_one, sketches))).decode("ascii")


def unpack(text: str | bytes) -> list[Packed]:
    """Unpack the text of `pack`, with rounded values. ValueError where `text` is not valid."""
    data = unwrap(text)
    return [unpack_one(data[offset : offset + ITEM_BYTES]) for offset in range(0, len(data), ITEM_BYTES)]


def unwrap(text: str | bytes) -> bytes:
    """Decode the text of `pack` to bytes, `ITEM_BYTES` per sketch. ValueError where they are not valid.

    Records from a block contain the bytes already.
    """
    data = text if isinstance(text, bytes) else decode85(text)
    if len(data) % ITEM_BYTES:
        raise ValueError(f"{len(data)} bytes are not a multiple of a sketch")
    if unknown := data[::ITEM_BYTES].translate(None, _CODES):
        raise ValueError(f"{unknown[0]} is not a code of a norm")
    return data


def _pack_one(sketch: Sketch) -> bytes:
    if sketch.nonfinite or not math.isfinite(sketch.value):
        return _ITEM.pack(_NO_NUMBER, min(sketch.nonfinite, 2**32 - 1))
    # The square of a tiny float64 underflows to 0, and so does the norm.
    norm = max(sketch.norm, abs(sketch.value)) if sketch.norm < 1e-150 else sketch.norm
    code = bisect_left(SCALES, norm * NORM_SLACK)
    if code >= len(SCALES):
        return _ITEM.pack(_NO_NUMBER, 0)
    scale = SCALES[code]
    steps = round(sketch.value / scale * STEPS) if scale else 0
    if abs(steps) >= 2**31:
        return _ITEM.pack(_NO_NUMBER, 0)
    return _SIGNED_ITEM.pack(code, steps)


def unpack_one(item: bytes) -> Packed:
    """Unpack one sketch of the bytes of `unwrap`."""
    code, steps = _SIGNED_ITEM.unpack(item)
    if code == _NO_NUMBER:
        return Packed(math.nan, math.inf, math.inf, 0.0, _ITEM.unpack(item)[1])
    scale, error, low, _ = OF_CODE[code]
    return Packed(steps / STEPS * scale, error, scale, low, 0)
