"""Constants of digests and sketches: seeds, keys, a sign for each position of a block, and a weight for each block.

They follow from fixed seeds, so that digests and sketches of all versions are comparable.
"""

from __future__ import annotations

import hashlib
from functools import cache

LANES = 2
# Words of four bytes in a level-1 block. 1024 lets one GPU program hold every key of both lanes in registers.
BLOCK_WORDS = 1024

MASK32 = (1 << 32) - 1
MASK64 = (1 << 64) - 1

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def _seed(name: str) -> int:
    """A seed that follows from its name."""
    return int.from_bytes(hashlib.blake2b(f"ddpcheck {name}".encode(), digest_size=8).digest(), "little")


WORD_SEEDS = tuple(_seed(f"words, lane {lane}") for lane in range(LANES))
BLOCK_SEEDS = tuple(_seed(f"blocks, lane {lane}") for lane in range(LANES))


def splitmix64(seed: int, index: int) -> int:
    """Output number `index` of the splitmix64 stream that starts at `seed`."""
    z = (seed + (index + 1) * GAMMA) & MASK64
    z = ((z ^ (z >> 30)) * MIX_1) & MASK64
    z = ((z ^ (z >> 27)) * MIX_2) & MASK64
    return z ^ (z >> 31)


def word_key(lane: int, index: int) -> int:
    """The key of word `index` of a block."""
    return splitmix64(WORD_SEEDS[lane], index)


def block_key(lane: int, index: int) -> int:
    """Keys 2b and 2b + 1 belong to the low and the high half of block b's sum."""
    return splitmix64(BLOCK_SEEDS[lane], index)


def signed64(value: int) -> int:
    """The int64 with the bits of `value`: torch multiplies and adds in int64, which wraps the same way."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


# Elements per operation. From 32768 elements on, torch uses its OpenMP threads. A multiple of 64 keeps every piece of
# the signs aligned for vector instructions.
PIECE = 32704
PIECES_PER_BLOCK = 4
# Signs are independent within a block and repeat in the next.
BLOCK = PIECE * PIECES_PER_BLOCK
# Upper bound of all weights. Block 0, the only one of most parameters, has weight 1.
LARGEST_WEIGHT = 1.5

_SIGN_SEED = int.from_bytes(b"ddpcheck", "little")
WEIGHT_SEED = int.from_bytes(b"sketches", "little")


def signs() -> list[float]:
    """+1 or -1 for each position of a block: bit j % 64 of random word j // 64."""
    return [1.0 if word >> bit & 1 else -1.0 for word in _sign_words() for bit in range(64)]


def sign_bits() -> bytes:
    """The signs as one bit per position, starting with the lowest bit of the first byte: set for +1."""
    return b"".join(word.to_bytes(8, "little") for word in _sign_words())


def _sign_words() -> list[int]:
    return [_random_word(_SIGN_SEED, index) for index in range(BLOCK // 64)]


@cache
def weight(block: int) -> float:
    """1 for block 0, else a number in [0.5, 1.5) with a random sign.

    The magnitudes make swapped blocks visible. The signs prevent errors that are equal in every block, as those of a
    constant gradient, from accumulating.
    """
    if block == 0:
        return 1.0
    bits = _random_word(WEIGHT_SEED, block)
    magnitude = 0.5 + (bits >> 11) * 2.0**-53
    return magnitude if bits & 1 else -magnitude


def _random_word(seed: int, index: int) -> int:
    return splitmix64(seed, index)
