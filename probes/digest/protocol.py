"""The 16 bytes that stand for a tensor's dtype, shape and strides: where its leaf starts before any data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch

from ddpcheck.records.sketch_signs import LANES, MASK64


class DigestFuture(Protocol):
    """Digests under way."""

    def ready(self) -> bool:
        """Whether `result` would return without waiting; never waits itself."""

    def result(self) -> list[bytes]:
        """One leaf per tensor, in the order they were submitted; waits for the device where it has to."""


class ReadyDigests:
    """Digests that were finished before the ticket was written."""

    __slots__ = ("_leaves",)

    def __init__(self, leaves: list[bytes]) -> None:
        self._leaves = leaves

    def ready(self) -> bool:
        return True

    def result(self) -> list[bytes]:
        return self._leaves


digest_size = 16


def describe(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> str:
    """Dtype, shape and strides as text.

    The stride of a dimension of size 0 or 1 moves nothing, and torch is free to report any: two replicas that
    differ only there hold the same memory, so it is left out.
    """
    empty = 0 in shape
    meaningful = [0 if empty or size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
    return f"{dtype} {list(shape)} {meaningful}"


def label_of(description: str) -> bytes:
    return hashlib.blake2b(description.encode(), digest_size=digest_size, person=b"ddpcheck label").digest()


def lane_starts(label: bytes) -> list[int]:
    """What each lane of multilinear-128 starts from; added at the end, which is the same modulo 2**64."""
    return [int.from_bytes(label[8 * lane : 8 * lane + 8], "little") for lane in range(LANES)]


def seed_of(label: bytes) -> int:
    """The same for xxh3, whose seed has 64 bits."""
    return int.from_bytes(label[:8], "little")


def finish(label: bytes, lanes: Sequence[int]) -> bytes:
    """The leaf, from the lanes' sums as int64 and the label they were not started from."""
    pairs = zip(lanes, lane_starts(label), strict=True)
    return b"".join(((lane + start) & MASK64).to_bytes(8, "little") for lane, start in pairs)


# The leaf of a tensor whose bits cannot be read: the same everywhere, and never the leaf of one that can.
UNSUPPORTED = b"\xff" * digest_size


def combine(leaves: Sequence[bytes]) -> bytes:
    """The root of `leaves`; depends on each of them, on their order and on their number."""
    # A running hash of equal-sized items: no two lists give the same input, so no separators are needed.
    return hashlib.blake2b(b"".join(leaves), digest_size=digest_size, person=b"ddpcheck tree").digest()
