"""multilinear-128 in plain Python: the slow reference implementation for the torch and Triton versions."""

from __future__ import annotations

from ddpcheck.probes.digest.protocol import lane_starts
from ddpcheck.records.sketch_signs import BLOCK_WORDS, LANES, MASK32, MASK64, block_key, word_key


def words_of(data: bytes) -> list[int]:
    """Little-endian unsigned words of four bytes; the last one filled up with zeros."""
    padded = data + bytes(-len(data) % 4)
    return [int.from_bytes(padded[at : at + 4], "little") for at in range(0, len(padded), 4)]


def block_sum(lane: int, words: list[int]) -> int:
    """Level 1: the sum of key times word, modulo 2**64."""
    return sum(word_key(lane, index) * word for index, word in enumerate(words)) & MASK64


def lane_hash(lane: int, words: list[int]) -> int:
    """Level 2: the same over the halves of the block sums."""
    total = 0
    for block, start in enumerate(range(0, len(words), BLOCK_WORDS)):
        value = block_sum(lane, words[start : start + BLOCK_WORDS])
        total += block_key(lane, 2 * block) * (value & MASK32)
        total += block_key(lane, 2 * block + 1) * (value >> 32)
    return total & MASK64


def multilinear_128(data: bytes, header: bytes) -> bytes:
    """The leaf of `data` as stored by a tensor whose dtype, shape and strides make `label`."""
    words = words_of(data)
    starts = lane_starts(header)
    lanes = [(starts[lane] + lane_hash(lane, words)) & MASK64 for lane in range(LANES)]
    return b"".join(lane.to_bytes(8, "little") for lane in lanes)
