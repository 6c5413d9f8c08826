"""The compiled kernel of a sketch, where it was built: one pass over a tensor instead of torch's four."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from math import isfinite
from pathlib import Path

import torch

from ddpcheck.records.sketch_signs import BLOCK, PIECE, sign_bits, weight

# A name of its own for each dtype that the library knows.
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# Numbers that a library has to add up right before it is used.
_TRIAL = [float(number) for number in range(-9, 10)]

# Data, number of elements, elements a piece, signs, place of the first element, number of signs, weights, totals.
Kernel = Callable[[int, int, int, int, int, int, int, int], None]

# In one call: the interpreter's lock is kept for its tenth of a millisecond.
MOST_PIECES = 16

# The sum, what rounding took from it, the sum of squares.
_Doubles = ctypes.c_double * 3


class NativeTotals:
    """What a kernel has added up of one tensor so far."""

    __slots__ = ("_doubles", "address")

    def __init__(self) -> None:
        self._doubles = _Doubles()
        self.address = ctypes.addressof(self._doubles)

    def value_and_squares(self) -> tuple[float, float]:
        value, lost, squares = self._doubles
        # Beyond all numbers nothing is lost that could be told.
        return (value + lost if isfinite(value) else value), squares


class BlockWeights:
    """The weights of the first blocks of any tensor, as many as any has needed so far."""

    def __init__(self) -> None:
        # A kernel that another thread is about to call may have been given an earlier one.
        self._tables: list[ctypes.Array[ctypes.c_double]] = []
        self._length = 0
        self._address = 0

    def address(self, blocks: int) -> int:
        if blocks > self._length:
            length = max(64, 2 * blocks)
            table = (ctypes.c_double * length)(*map(weight, range(length)))
            self._tables.append(table)
            # In this order: another thread may come by between the two.
            self._address = ctypes.addressof(table)
            self._length = length
        return self._address


_weights = BlockWeights()


class NativeKernel:
    """Adds up tensors of one dtype by their address."""

    def __init__(self, kernel: Kernel, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._kernel = kernel
        self._signs = ctypes.create_string_buffer(sign_bits())
        self._first_sign = ctypes.addressof(self._signs)

    def add(self, totals: NativeTotals, address: int, start: int, count: int) -> None:
        """`count` elements of a tensor from number `start` on, which is a multiple of PIECE."""
        weights = _weights.address((start + count) // BLOCK + 1)
        self._kernel(address, count, PIECE, self._first_sign, start, BLOCK, weights, totals.address)


@cache
def native_kernel(dtype: torch.dtype) -> NativeKernel | None:
    """None where it was not built, or not for this dtype or machine."""
    if dtype not in _NAMES:
        return None
    library = _library()
    if library is None:
        return None
    kernel = getattr(library, f"ddpcheck_sketch_add_{_NAMES[dtype]}", None)
    if kernel is None:
        return None  # a library of another version, left over in a checkout
    address, size = ctypes.c_void_p, ctypes.c_size_t
    kernel.argtypes = [address, size, size, address, size, size, address, address]
    kernel.restype = None
    found = NativeKernel(kernel, dtype)
    return found if _counts_right(found) else None


@cache
def _library() -> ctypes.PyDLL | None:
    # Its name ends in that of the interpreter it was built beside. It uses nothing of it, so any will do.
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            # The interpreter's lock is kept: a call takes microseconds, another thread could take milliseconds.
            return ctypes.PyDLL(str(path))
        except OSError:
            continue  # built for another kind of machine, or on a disk from which nothing may be run
    return None


def _counts_right(kernel: NativeKernel) -> bool:
    with torch.inference_mode(False):
        tensor = torch.tensor(_TRIAL, dtype=kernel.dtype, device="cpu")
    bits = int.from_bytes(sign_bits()[:8], "little")
    signed = sum(value if bits >> place & 1 else -value for place, value in enumerate(_TRIAL))
    totals = NativeTotals()
    kernel.add(totals, tensor.data_ptr(), 0, len(_TRIAL))
    return totals.value_and_squares() == (signed, sum(value * value for value in _TRIAL))
