"""What all digest algorithms share: the header of a tensor, the future of its leaf, the root over all leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import torch

from ddpcheck.records.sketch_signs import LANES, MASK64

DIGEST_SIZE = 16

# Format characters of items with this many bytes.
_ITEMS: dict[int, Literal["B", "H", "I", "Q"]] = {1: "B", 2: "H", 4: "I", 8: "Q"}

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


class Leaves:
    """The leaves of a list of tensors, packed: the work on a whole model is a few calls into C."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @staticmethod
    def of(leaves: Iterable[bytes]) -> Leaves:
        return Leaves(b"".join(leaves))

    def __len__(self) -> int:
        return len(self.packed) // DIGEST_SIZE

    def __getitem__(self, index: int) -> bytes:
        return self.packed[DIGEST_SIZE * index : DIGEST_SIZE * (index + 1)]

    def __iter__(self) -> Iterator[bytes]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Leaves) and self.packed == other.packed

    __hash__ = None  # type: ignore[assignment]

    def updated(self, leaves: Mapping[int, bytes]) -> Leaves:
        """These leaves with some of them replaced, by index."""
        packed = bytearray(self.packed)
        for index, leaf in leaves.items():
            packed[DIGEST_SIZE * index : DIGEST_SIZE * (index + 1)] = leaf
        return Leaves(bytes(packed))

    def root(self) -> bytes:
        """Depends on each leaf, on their order and on their number."""
        # All items have the same size: no two lists give the same input, so no separators are needed.
        return hashlib.blake2b(self.packed, digest_size=DIGEST_SIZE, person=b"ddpcheck tree").digest()

    def narrow(self, width: int) -> bytes:
        """The first `width` bytes of each leaf; 1, 2, 4 or 8."""
        items = memoryview(self.packed).cast(_ITEMS[width])
        return items[:: DIGEST_SIZE // width].tobytes()


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
    """The root of `leaves`."""
    return Leaves.of(leaves).root()
