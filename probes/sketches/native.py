"""The compiled kernel of a sketch, if it was built: one pass over a tensor instead of four with torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from math import isfinite
from pathlib import Path

import torch

from ddpcheck.records.sketch_signs import BLOCK, PIECE, sign_bits, weight

# The library has one function for each of these dtypes.
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# A library is used only if it sums these numbers correctly.
_TRIAL_VALUES = [float(number) for number in range(-9, 10)]

# Data, number of elements, elements per piece, signs, index of the first element, number of signs, weights, totals.
Kernel = Callable[[int, int, int, int, int, int, int, int], None]

# Per call: the GIL is held for a tenth of a millisecond.
MAX_PIECES = 16

# The sum, its rounding error, the sum of squares.
_Doubles = ctypes.c_double * 3


class NativeTotals:
    """The sums of one tensor so far."""

    __slots__ = ("_doubles", "address")

    def __init__(self) -> None:
        self._doubles = _Doubles()
        self.address = ctypes.addressof(self._doubles)

    def value_and_squares(self) -> tuple[float, float]:
        value, lost, squares = self._doubles
        # After an overflow the rounding error has no meaning.
        return (value + lost if isfinite(value) else value), squares


class BlockWeights:
    """The weights of the first blocks of any tensor; the table grows with the largest tensor so far."""

    def __init__(self) -> None:
        # Earlier tables stay alive: another thread may be about to pass one to a kernel.
        self._tables: list[ctypes.Array[ctypes.c_double]] = []
        self._length = 0
        self._address = 0

    def address(self, blocks: int) -> int:
        if blocks > self._length:
            length = max(64, 2 * blocks)
            table = (ctypes.c_double * length)(*map(weight, range(length)))
            self._tables.append(table)
            # In this order: another thread may run between the two assignments.
            self._address = ctypes.addressof(table)
            self._length = length
        return self._address


_weights = BlockWeights()


class NativeKernel:
    """Sums tensors of one dtype by their address."""

    def __init__(self, kernel: Kernel, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._kernel = kernel
        self._signs = ctypes.create_string_buffer(sign_bits())
        self._first_sign = ctypes.addressof(self._signs)

    def add(self, totals: NativeTotals, address: int, start: int, count: int) -> None:
        """Add `count` elements of a tensor, beginning with index `start`, which is a multiple of PIECE."""
        weights = _weights.address((start + count) // BLOCK + 1)
        self._kernel(address, count, PIECE, self._first_sign, start, BLOCK, weights, totals.address)


@cache
def native_kernel(dtype: torch.dtype) -> NativeKernel | None:
    """None if it was not built, or not for this dtype or machine."""
    if dtype not in _NAMES:
        return None
    library = _library()
    if library is None:
        return None
    kernel = getattr(library, f"ddpcheck_sketch_add_{_NAMES[dtype]}", None)
    if kernel is None:
        return None  # a library of another version, left in a checkout
    address, size = ctypes.c_void_p, ctypes.c_size_t
    kernel.argtypes = [address, size, size, address, size, size, address, address]
    kernel.restype = None
    native = NativeKernel(kernel, dtype)
    return native if _sums_correctly(native) else None


@cache
def _library() -> ctypes.PyDLL | None:
    # The name ends with the tag of the interpreter that built it. The library does not use Python, so any tag works.
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            # PyDLL holds the GIL: a call takes microseconds, while reacquiring the GIL could take milliseconds.
            return ctypes.PyDLL(str(path))
        except OSError:
            continue  # built for another architecture, or on a file system mounted with noexec
    return None


def _sums_correctly(kernel: NativeKernel) -> bool:
    with torch.inference_mode(False):
        tensor = torch.tensor(_TRIAL_VALUES, dtype=kernel.dtype, device="cpu")
    bits = int.from_bytes(sign_bits()[:8], "little")
    signed = sum(value if bits >> index & 1 else -value for index, value in enumerate(_TRIAL_VALUES))
    totals = NativeTotals()
    kernel.add(totals, tensor.data_ptr(), 0, len(_TRIAL_VALUES))
    return totals.value_and_squares() == (signed, sum(value * value for value in _TRIAL_VALUES))
