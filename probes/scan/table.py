"""A table of tensors: what follows from their layout is kept from step to step, and one native call reads them all.

A row depends on type, size, strides and dtype of its tensor. These are asked for at each use, each with one call into C
for the whole list, and a row whose tensor has changed is made anew. Addresses are never reused without asking.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import lru_cache
from operator import add, attrgetter, le, mul
from typing import Any

import torch

from ddpcheck import torch_compat
from ddpcheck.probes.digest.tensor_bytes import TensorLayout, direct_span
from ddpcheck.probes.scan.library import (
    MAX_DIMS,
    ROW_DTYPES,
    ElementOrder,
    RowLayout,
    ScanLibrary,
    scan_library,
)

DIGEST, SKETCH, COUNT = 1, 2, 4
DIGEST_BYTES = 16
# Signed sum, norm, count of non-finite values.
NUMBERS = 3
# Tensors with more bytes are large: a few windows of them are sampled where they are not read again.
LARGE = 1 << 18

_NONE = type(None)
# Takes the row of a missing tensor.
EMPTY = torch.empty(0, device="cpu")

_data_ptr: Any = torch.Tensor.data_ptr
_stride: Any = torch.Tensor.stride
_storage_offset: Any = torch.Tensor.storage_offset
_untyped_storage: Any = torch.Tensor.untyped_storage
_storage_bytes: Any = torch.UntypedStorage.nbytes
_nbytes = attrgetter("nbytes")
_dtype = attrgetter("dtype")
_itemsize = attrgetter("itemsize")
_device = attrgetter("device")


def merged_dims(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Sizes and strides of the dimensions in row-major order; neighbours that are one span in memory are merged."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size <= 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged


class ListSignature:
    """What the rows of a list of tensors depend on: type, strides, size and dtype of each."""

    def __init__(self) -> None:
        self._types: list[type] = []
        self._strides: list[tuple[int, ...]] = []
        self._sizes: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._device: torch.device | None = None
        self._addresses = array("Q")

    def addresses(self, tensors: Sequence[Any]) -> array[int] | None:
        """The addresses of the tensors now; None: they are not like those of `keep`."""
        types = list(map(type, tensors))
        if types != self._types:
            return None
        if _NONE in types:
            tensors = [EMPTY if tensor is None else tensor for tensor in tensors]
        try:
            strides, sizes = list(map(_stride, tensors)), list(map(_nbytes, tensors))
            same = strides == self._strides and sizes == self._sizes
            # At the same address, too: memory is reused, and `.data` may be another view of it.
            if not same or list(map(_dtype, tensors)) != self._dtypes:
                return None
            addresses = array("Q", map(_data_ptr, tensors))
            if addresses != self._addresses:
                if not self._moved(tensors):
                    return None
                self._addresses = addresses
            # The same object while nothing moves.
            return self._addresses
        except RuntimeError:
            return None  # sparse, nested, …: such lists are rare, and are made anew each time

    def _moved(self, tensors: Sequence[Any]) -> bool:
        """Whether the rows still describe `tensors`, which have other addresses now.

        A tensor on another device has an address that must not be read here. A storage that was freed or cut leaves
        tensors whose memory ends earlier than they do.
        """
        if not set(map(_device, tensors)) <= {self._device, EMPTY.device}:
            return False
        held = map(_storage_bytes, map(_untyped_storage, tensors))
        offsets = list(map(_storage_offset, tensors))
        if any(offsets):
            ends = map(add, map(mul, offsets, map(_itemsize, tensors)), self._sizes)
            return all(map(le, ends, held))
        return all(map(le, self._sizes, held))

    def keep(self, tensors: Sequence[Any] | None, device: torch.device = EMPTY.device) -> None:
        """Remember the tensors of a list. None: the next list is made anew, whatever it holds."""
        tensors = tensors or []
        self._types = list(map(type, tensors))
        self._device = device
        tensors = [EMPTY if tensor is None else tensor for tensor in tensors]
        self._strides = list(map(_stride, tensors))
        self._sizes = list(map(_nbytes, tensors))
        self._dtypes = list(map(_dtype, tensors))
        self._addresses = array("Q", map(_data_ptr, tensors))


class TensorTable:
    """The rows of one list of tensors. `None` in the list is a row that is not read."""

    def __init__(self, library: ScanLibrary) -> None:
        self.library = library
        self._signature = ListSignature()
        self._rows: Any = (RowLayout * 0)()
        self._orders: dict[int, ElementOrder] = {}
        self.addresses = array("Q")
        # Bytes of each row; for samples of the first values, 0 where the memory is not in row-major order.
        self.row_bytes = array("Q")
        self.row_major_bytes = array("Q")
        self.large: list[int] = []
        # Which rows have a tensor, and which can be digested and sketched; others have to be read by torch.
        self.present = b""
        self.digestible = b""
        self.sketchable = b""
        self._largest = 0
        self._total = 0
        # Counts how often rows were made anew.
        self.revision = 0

    def update(self, tensors: Sequence[Any]) -> bool:
        """Bring the table up to date with `tensors`; whether a row was made anew."""
        with torch_compat.no_torch_function():
            addresses = self._signature.addresses(tensors)
            if addresses is not None:
                self.addresses = addresses
                return False
            self._rebuild(tensors)
            return True

    def _rebuild(self, tensors: Sequence[Any]) -> None:
        count = len(tensors)
        self.revision += 1
        self._rows = (RowLayout * count)()
        self._orders = {}
        self.addresses = array("Q", bytes(8 * count))
        self.row_bytes = array("Q", bytes(8 * count))
        self.row_major_bytes = array("Q", bytes(8 * count))
        self.large = []
        digestible, sketchable = bytearray(count), bytearray(count)
        self._largest = self._total = 0
        plain = True
        for index, tensor in enumerate(tensors):
            if tensor is None:
                continue
            span = direct_span(tensor) if tensor.is_cpu else None
            if span is None:
                plain = False
                continue
            layout, self.addresses[index] = span
            row = self._rows[index]
            row.bytes, row.seed = layout.nbytes, layout.seed
            digestible[index] = 1
            self.row_bytes[index] = layout.nbytes
            if layout.nbytes > LARGE:
                self.large.append(index)
            if layout.by_rows:
                self.row_major_bytes[index] = layout.nbytes
            self._total += layout.nbytes
            if layout.dtype in ROW_DTYPES and self._set_order(index, layout, tensor):
                row.dtype = ROW_DTYPES[layout.dtype]
                sketchable[index] = 1
                self._largest = max(self._largest, layout.numel)
        self.present = bytes(tensor is not None for tensor in tensors)
        self.digestible, self.sketchable = bytes(digestible), bytes(sketchable)
        self._signature.keep(tensors if plain else None)

    def _set_order(self, index: int, layout: TensorLayout, tensor: Any) -> bool:
        """Sketches are taken in row-major order; whether the library can read this tensor so."""
        if layout.by_rows:
            return True
        merged = merged_dims(tensor.shape, tensor.stride())
        if len(merged) > MAX_DIMS:
            return False
        order = self._orders[index] = ElementOrder(len(merged))
        order.sizes[: len(merged)] = [size for size, _ in merged]
        order.strides[: len(merged)] = [stride for _, stride in merged]
        self._rows[index].order = ctypes.pointer(order)
        return True

    def scan(self, work: bytes) -> ScanResult | None:
        """Read the rows as `work` asks for each. None if the memory of one is gone."""
        count = len(work)
        digests = bytearray(DIGEST_BYTES * count)
        sketches = array("d", bytes(8 * NUMBERS * count))
        unread = self.library.scan(
            self.addresses.buffer_info()[0],
            ctypes.addressof(self._rows),
            _address(work),
            count,
            self._total,
            self._largest,
            ctypes.addressof(ctypes.c_char.from_buffer(digests)) if count else 0,
            sketches.buffer_info()[0],
        )
        return None if unread else ScanResult(digests, sketches)


class ScanResult:
    """Digests and sketches by row; zeros where nothing was asked for."""

    __slots__ = ("digests", "sketches")

    def __init__(self, digests: bytearray, sketches: array[float]) -> None:
        self.digests = digests
        self.sketches = sketches


@lru_cache(maxsize=256)
def _address(data: bytes) -> int:
    """The address of `data`, or of equal bytes that the cache keeps alive."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def make_table() -> TensorTable | None:
    """None without the compiled library."""
    library = scan_library()
    return None if library is None else TensorTable(library)
