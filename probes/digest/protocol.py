"""What all digest algorithms share: the header of a tensor, the future of its leaf, the root over all leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch

from ddpcheck.records.sketch_signs import LANES, MASK64

DIGEST_SIZE = 16

# The leaf of a tensor whose bits cannot be read: the same on all ranks, and never the leaf of a readable tensor.
UNSUPPORTED = b"\xff" * DIGEST_SIZE


def describe(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> str:
    """Dtype, shape and strides as text.

    The stride of a dimension of size 0 or 1 has no effect, and torch may report any value. Two replicas that
    differ only there hold the same memory, so such strides are left out.
    """
    empty = 0 in shape
    meaningful = [0 if empty or size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
    return f"{dtype} {list(shape)} {meaningful}"


def header_of(description: str) -> bytes:
    """16 bytes for dtype, shape and strides: the initial state of a leaf."""
    return hashlib.blake2b(description.encode(), digest_size=DIGEST_SIZE, person=b"ddpcheck label").digest()


def lane_starts(header: bytes) -> list[int]:
    """The initial value of each lane of multilinear-128; it may be added last, which is the same modulo 2**64."""
    return [int.from_bytes(header[8 * lane : 8 * lane + 8], "little") for lane in range(LANES)]


def seed_of(header: bytes) -> int:
    """The initial state of xxh3, whose seed has 64 bits."""
    return int.from_bytes(header[:8], "little")


def finish_leaf(header: bytes, lanes: Sequence[int]) -> bytes:
    """The leaf, from the lane sums (int64) and the header, which they do not include yet."""
    pairs = zip(lanes, lane_starts(header), strict=True)
    return b"".join(((lane + start) & MASK64).to_bytes(8, "little") for lane, start in pairs)


class DigestFuture(Protocol):
    """Digests that may still be computed on a device."""

    def ready(self) -> bool:
        """Whether `result` would return without waiting; never waits itself."""

    def result(self) -> list[bytes]:
        """One leaf per tensor, in the order they were submitted; waits for the device if necessary."""


class ReadyDigests:
    """A future whose digests were complete when it was made."""

    __slots__ = ("_leaves",)

    def __init__(self, leaves: list[bytes]) -> None:
        self._leaves = leaves

    def ready(self) -> bool:
        return True

    def result(self) -> list[bytes]:
        return self._leaves


def combine(leaves: Sequence[bytes]) -> bytes:
    """The root of `leaves`; depends on each of them, on their order and on their number."""
    # All items have the same size: no two lists give the same input, so no separators are needed.
    return hashlib.blake2b(b"".join(leaves), digest_size=DIGEST_SIZE, person=b"ddpcheck tree").digest()
