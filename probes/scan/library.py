"""The compiled part, if it was built: kernels of sketches, and one call that reads a whole table of tensors.

Everything here is optional. Without the library, or without the `xxhash` package, torch and Python do the same work.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from ddpcheck.records.codecs import ALPHABET_85, NORM_SLACK, SCALES, STEPS
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
        self._first_sign = ctypes.addressof(_sign_table())

    def add(self, totals: NativeTotals, address: int, start: int, count: int) -> None:
        """Add `count` elements of a tensor, beginning with index `start`, which is a multiple of PIECE."""
        weights = _weights.address((start + count) // BLOCK + 1)
        self._kernel(address, count, PIECE, self._first_sign, start, BLOCK, weights, totals.address)


@cache
def _sign_table() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(sign_bits())


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
def _path() -> str | None:
    # Earlier builds ended with the tag of an interpreter. The library does not use Python, so any tag works.
    paths = Path(__file__).parent.glob("_native*.so")
    for path in sorted(paths, key=lambda path: (path.name != "_native.so", path.name)):
        try:
            ctypes.PyDLL(str(path))
        except OSError:
            continue  # built for another architecture, or on a file system mounted with noexec
        return str(path)
    return None


@cache
def _library() -> ctypes.PyDLL | None:
    path = _path()
    # PyDLL holds the GIL: a call takes microseconds, while reacquiring the GIL could take milliseconds.
    return None if path is None else ctypes.PyDLL(path)


def _sums_correctly(kernel: NativeKernel) -> bool:
    with torch.inference_mode(False):
        tensor = torch.tensor(_TRIAL_VALUES, dtype=kernel.dtype, device="cpu")
    bits = int.from_bytes(sign_bits()[:8], "little")
    signed = sum(value if bits >> index & 1 else -value for index, value in enumerate(_TRIAL_VALUES))
    totals = NativeTotals()
    kernel.add(totals, tensor.data_ptr(), 0, len(_TRIAL_VALUES))
    return totals.value_and_squares() == (signed, sum(value * value for value in _TRIAL_VALUES))


# The numbers of dtypes in a row of a table.
ROW_DTYPES = {torch.float32: 1, torch.bfloat16: 2}
MAX_DIMS = 8
# Above this size a call releases the GIL: other threads of the program should not wait for milliseconds.
_HOLDS_GIL = 1 << 20


class ElementOrder(ctypes.Structure):
    """The order of the elements of a tensor that is not row-major."""

    _fields_ = (
        ("dims", ctypes.c_uint64),
        ("sizes", ctypes.c_uint64 * MAX_DIMS),
        ("strides", ctypes.c_uint64 * MAX_DIMS),
    )


class RowLayout(ctypes.Structure):
    """A tensor of a table, without its address."""

    _fields_ = (
        ("bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("dtype", ctypes.c_uint64),
        ("order", ctypes.POINTER(ElementOrder)),
    )


class _Constants(ctypes.Structure):
    _fields_ = (
        ("at_once", ctypes.c_void_p),
        ("reset", ctypes.c_void_p),
        ("update", ctypes.c_void_p),
        ("finish", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("signs", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("piece", ctypes.c_uint64),
        ("block", ctypes.c_uint64),
    )


class _Packing(ctypes.Structure):
    _fields_ = (
        ("scales", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("slack", ctypes.c_double),
        ("steps", ctypes.c_double),
    )


class ScanLibrary:
    """The functions of scan.c. Arguments are addresses of memory that the caller keeps."""

    def __init__(self, path: str, hash_functions: dict[str, int]) -> None:
        holding, releasing = ctypes.PyDLL(path), ctypes.CDLL(path)
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self._scan_holding = _function(
            holding.ddpcheck_scan, [address, address, address, size] + [address] * 3
        )
        self._scan_releasing = _function(
            releasing.ddpcheck_scan, [address, address, address, size] + [address] * 3
        )
        self.samples = _function(
            holding.ddpcheck_samples, [address, address, size, size, size, address, address]
        )
        self.windows = _function(
            holding.ddpcheck_windows, [address, address, size, size, size, size, address]
        )
        self._text = _function(
            holding.ddpcheck_sketch_text, [address, address, size, address, address, address]
        )
        self._constants = _Constants(
            signs=ctypes.addressof(_sign_table()), piece=PIECE, block=BLOCK, **hash_functions
        )
        # A finalizer may interrupt `scan` and call it again in the same thread.
        self._lock = threading.RLock()
        self._scales = (ctypes.c_double * len(SCALES))(*SCALES)
        self._packing = _Packing(ctypes.addressof(self._scales), len(SCALES), NORM_SLACK, STEPS)
        self._alphabet = ctypes.create_string_buffer(ALPHABET_85)

    def scan(
        self,
        addresses: int,
        rows: int,
        work: int,
        count: int,
        total: int,
        largest: int,
        digests: int,
        sketches: int,
    ) -> int:
        """Read the rows; returns how many could not be read.

        `total`: bytes of all rows; `largest`: elements of the largest one.
        """
        scan = self._scan_holding if total <= _HOLDS_GIL else self._scan_releasing
        # There is one state for hashing in pieces.
        with self._lock:
            self._constants.weights = _weights.address(largest // BLOCK + 1)
            return scan(addresses, rows, work, count, ctypes.addressof(self._constants), digests, sketches)

    def sketch_text(self, sketches: int, indices: int | None, count: int) -> str:
        """The text of `pack` for `count` sketches of three numbers each."""
        text = ctypes.create_string_buffer(7 * count + 10)
        packing, alphabet = ctypes.addressof(self._packing), ctypes.addressof(self._alphabet)
        length = self._text(sketches, indices, count, packing, alphabet, ctypes.addressof(text))
        return text.raw[:length].decode("ascii")


def _function(function: Any, arguments: list[Any]) -> Callable[..., int]:
    function.argtypes, function.restype = arguments, ctypes.c_size_t
    result: Callable[..., int] = function
    return result


@cache
def scan_library() -> ScanLibrary | None:
    """None if the library was not built, or if the `xxhash` package is missing or does not export its functions."""
    path = _path()
    # The kernels are tried first: a library that sums wrongly is not used for anything.
    if path is None or native_kernel(torch.float32) is None or native_kernel(torch.bfloat16) is None:
        return None
    try:
        return ScanLibrary(path, _hash_functions())
    except (ImportError, OSError, AttributeError):
        return None


def _hash_functions() -> dict[str, int]:
    """The addresses of xxh3-128 in the extension module of the `xxhash` package, and a state for hashing in pieces."""
    functions = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
    create = functions.XXH3_createState
    create.restype = ctypes.c_void_p
    names = {
        "at_once": "XXH3_128bits_withSeed",
        "reset": "XXH3_128bits_reset_withSeed",
        "update": "XXH3_128bits_update",
        "finish": "XXH3_128bits_digest",
    }
    addresses = {
        key: int(ctypes.cast(getattr(functions, name), ctypes.c_void_p).value or 0)
        for key, name in names.items()
    }
    return {**addresses, "state": create()}
