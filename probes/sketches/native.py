"""The compiled kernel of a sketch, where it was built: one pass over a tensor instead of torch's four."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from .weights import BLOCK, PIECE, sign_bits

# A name of its own for each dtype that the library knows.
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# Numbers that a library has to add up right before it is used.
_TRIAL = [float(number) for number in range(-9, 10)]

# Data, number of elements, elements a piece, signs, place of the first element among them, number of signs, results.
Kernel = Callable[[int, int, int, int, int, int, int], None]

# In one call: the interpreter's lock is kept for its tenth of a millisecond.
MOST_PIECES = 16


class Results(threading.local):
    """Two doubles a piece of each thread's own: the signed sum and the sum of squares."""

    def __init__(self) -> None:
        self.doubles = (ctypes.c_double * (2 * MOST_PIECES))()
        self.address = ctypes.addressof(self.doubles)


class NativeKernel:
    """Sums of pieces of one dtype, read where they lie in memory."""

    def __init__(self, kernel: Kernel, dtype: torch.dtype) -> None:
        self._kernel = kernel
        self.dtype = dtype
        self._signs = ctypes.create_string_buffer(sign_bits())
        self._first_sign = ctypes.addressof(self._signs)
        self._results = Results()

    def sums(self, address: int, start: int, count: int) -> list[float]:
        """Signed sum and sum of squares of each piece of `count` elements that begin at a multiple of PIECE."""
        results = self._results
        self._kernel(address, count, PIECE, self._first_sign, start % BLOCK, BLOCK, results.address)
        return results.doubles[: 2 * -(-count // PIECE)]


@cache
def native_kernel(dtype: torch.dtype) -> NativeKernel | None:
    """None where it was not built, or not for this dtype or machine."""
    if dtype not in _NAMES:
        return None
    library = _library()
    if library is None:
        return None
    kernel = getattr(library, f"ddpcheck_sketch_pieces_{_NAMES[dtype]}", None)
    if kernel is None:
        return None  # a library of another version, left over in a checkout
    address, size = ctypes.c_void_p, ctypes.c_size_t
    kernel.argtypes = [address, size, size, address, size, size, address]
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
    return kernel.sums(tensor.data_ptr(), 0, len(_TRIAL)) == [signed, sum(value * value for value in _TRIAL)]
