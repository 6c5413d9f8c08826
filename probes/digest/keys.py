"""The fixed keys of multilinear-128: a counter-based splitmix64, each key a function of its index alone."""

from __future__ import annotations

import hashlib

LANES = 2
# Words of four bytes in a level-1 block. 1024 lets one GPU program hold every key of both lanes in registers.
BLOCK_WORDS = 1024

MASK32 = (1 << 32) - 1
MASK64 = (1 << 64) - 1

GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def _seed(name: str) -> int:
    """A seed nobody chose: it follows from its name."""
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
