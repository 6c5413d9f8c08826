"""The fixed weights of a sketch: a sign for every position of a block, a signed weight for every block."""

from __future__ import annotations

from functools import cache

# Elements worked on at once. Below 32768, where torch would wake its OpenMP threads; a multiple of 64 keeps
# every piece of the signs aligned for vector instructions.
PIECE = 32704
PIECES_PER_BLOCK = 4
# Signs are independent within a block and come again in the next one.
BLOCK = PIECE * PIECES_PER_BLOCK
# No weight is larger. Block 0, the only one of most parameters, weighs 1.
LARGEST_WEIGHT = 1.5

_SIGN_SEED = int.from_bytes(b"ddpcheck", "little")
_WEIGHT_SEED = int.from_bytes(b"sketches", "little")


def signs() -> list[float]:
    """+1 or -1 for each position of a block: bit j % 64 of random word j // 64."""
    return [1.0 if word >> bit & 1 else -1.0 for word in _sign_words() for bit in range(64)]


def sign_bits() -> bytes:
    """The same as one bit for each position, from the lowest of the first byte on: set for +1."""
    return b"".join(word.to_bytes(8, "little") for word in _sign_words())


def _sign_words() -> list[int]:
    return [_random_word(_SIGN_SEED, index) for index in range(BLOCK // 64)]


@cache
def weight(block: int) -> float:
    """1 for block 0, else a number in [0.5, 1.5) with a random sign.

    The magnitudes make swapped blocks show. The signs keep an error that is the same in every block, as that
    of a constant gradient is, from adding up.
    """
    if block == 0:
        return 1.0
    bits = _random_word(_WEIGHT_SEED, block)
    magnitude = 0.5 + (bits >> 11) * 2.0**-53
    return magnitude if bits & 1 else -magnitude


def _random_word(seed: int, index: int) -> int:
    # Its package imports torch, and those who only want the constants above may not have it.
    from ddpcheck.probes.digest.keys import splitmix64

    return splitmix64(seed, index)
