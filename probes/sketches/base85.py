"""Reads base 85 many times quicker than the standard library does: all words of a text at once, in long integers.

A report on a thousand ranks reads a million sketches; one character at a time that would take most of its time.
"""

from __future__ import annotations

import base64
from functools import lru_cache

_NO_DIGIT = 255


def _digits() -> bytes:
    table = bytearray([_NO_DIGIT]) * 256
    words = base64.b85encode(b"".join(number.to_bytes(4, "big") for number in range(85)))
    # The last of the five characters of a small number is the digit itself.
    for number in range(85):
        table[words[5 * number + 4]] = number
    return bytes(table)


_DIGITS = _digits()


@lru_cache(maxsize=64)
def _masks(words: int) -> tuple[int, int, int]:
    """Lanes of five bytes: the first and third byte of each, the first two, the first."""
    ones = int.from_bytes(b"\x01\0\0\0\0" * words, "little")
    return ones * 0xFF00FF, ones * 0xFFFF, ones * 0xFF


def decode85(text: str) -> bytes:
    """As `base64.b85decode`; ValueError for what is no base 85."""
    given = text.encode("ascii")
    missing = -len(given) % 5
    digits = (given + b"~" * missing).translate(_DIGITS)
    if _NO_DIGIT in digits:
        raise ValueError("not base85: a character of another alphabet")
    words = len(digits) // 5
    singles, pairs, last = _masks(words)
    # In each lane the first digit is the lowest byte: two digits become one number, then four, then all five.
    lanes = int.from_bytes(digits, "little")
    twos = (lanes & singles) * 85 + ((lanes >> 8) & singles)
    fours = (twos & pairs) * 85**2 + ((twos >> 16) & pairs)
    numbers = (fours * 85 + ((lanes >> 32) & last)).to_bytes(5 * words, "little")
    if any(numbers[4::5]):
        raise ValueError("not base85: five characters beyond four bytes")
    data = bytearray(4 * words)
    for byte in range(4):
        data[byte::4] = numbers[3 - byte :: 5]
    return bytes(data[: len(data) - missing])
