"""A table of tensors on a device: kept from step to step, and read by one launch.

As in `table.py`, a row depends on type, size, strides and dtype of its tensor, which are asked for at each use with a
few calls into C. On the device are one row per tensor and a column of addresses. If only addresses have changed, as
those of gradients do, only that column is uploaded again. All uploads and launches are in order on the job's stream.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from math import sqrt
from operator import mod
from typing import Any, NamedTuple

import torch

from ddpcheck import device_api, torch_compat
from ddpcheck.probes.digest.device_copy import HostCopy, copy_to_host
from ddpcheck.probes.digest.tensor_bytes import TensorLayout, direct_span
from ddpcheck.probes.scan.device_kernels import (
    KINDS,
    MAX_DIMS,
    PROGRAM_BYTES,
    KernelTable,
    Kind,
    ResultField,
    TableKernel,
)
from ddpcheck.probes.scan.table import NUMBERS, ListSignature, merged_dims
from ddpcheck.records.sketch_signs import signed64

# Tables and columns of addresses kept per list of tensors: the scans of a step differ in what they ask for.
_KEPT = 8
_ORDER_COLUMNS = 1 + 2 * MAX_DIMS


class DeviceRow(NamedTuple):
    """What follows from the layout of one tensor."""

    layout: TensorLayout
    kind: Kind
    order: int


class Upload:
    """The newest few tensors that were made on the device, by what they were made of."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable) -> Any:
        value = self._kept.get(key)
        if value is not None:
            self._kept.move_to_end(key)
        return value

    def add(self, key: Hashable, value: Any) -> None:
        self._kept[key] = value
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)

    def clear(self) -> None:
        self._kept.clear()


class DeviceTable:
    """The rows of one list of tensors on one device. `None` in the list is a row that is not read."""

    def __init__(self, device: torch.device, kernel: TableKernel) -> None:
        self.device = device
        self._kernel = kernel
        self._signature = ListSignature()
        self._rows: list[DeviceRow | None] = []
        # The first one belongs to no row: no tensor on the device is empty.
        self._orders: list[list[int]] = []
        self.addresses = array("Q")
        # What each address has to be a multiple of.
        self._alignments: list[int] = []
        self.digestible = b""
        self.sketchable = b""
        # By stream and work; by stream and addresses. A stream may read before an upload on another one is complete.
        self._tables = Upload()
        self._columns = Upload()
        # Counts how often rows were made anew, and uploads.
        self.revision = 0
        self.uploads = 0

    def update(self, tensors: Sequence[Any]) -> bool:
        """Bring the table up to date with `tensors`, all on its device; whether rows were made anew."""
        with torch_compat.no_torch_function():
            addresses = self._signature.addresses(tensors)
            if addresses is not None and not any(map(mod, addresses, self._alignments)):
                self.addresses = addresses
                return False
            self._rebuild(tensors)
            return True

    def _rebuild(self, tensors: Sequence[Any]) -> None:
        count = len(tensors)
        self.revision += 1
        self._rows, self._orders, self._alignments = [None] * count, [[0] * _ORDER_COLUMNS], [1] * count
        self.addresses = array("Q", bytes(8 * count))
        digestible, sketchable = bytearray(count), bytearray(count)
        plain = True
        for index, tensor in enumerate(tensors):
            if tensor is None:
                continue
            span = direct_span(tensor)
            if span is None:
                plain = False
                continue
            layout, address = span
            self.addresses[index] = address
            digestible[index] = 1
            kind = KINDS.get(layout.dtype, Kind.BYTES)
            order = self._add_order(layout, tensor) if kind is not Kind.BYTES else -1
            if address % layout.itemsize or order is None:
                kind, order = Kind.BYTES, -1
            if kind is not Kind.BYTES:
                self._alignments[index] = layout.itemsize
            sketchable[index] = kind is not Kind.BYTES
            self._rows[index] = DeviceRow(layout, kind, order)
        self.digestible, self.sketchable = bytes(digestible), bytes(sketchable)
        self._tables.clear()
        self._columns.clear()
        self._signature.keep(tensors if plain else None, self.device)

    def _add_order(self, layout: TensorLayout, tensor: Any) -> int | None:
        """The row in the table of orders; -1: row-major; None: too many dimensions."""
        if layout.by_rows:
            return -1
        dims = merged_dims(tensor.shape, tensor.stride())
        if len(dims) > MAX_DIMS:
            return None
        rest = MAX_DIMS - len(dims)
        sizes = [size for size, _ in dims] + [1] * rest
        strides = [stride for _, stride in dims] + [0] * rest
        self._orders.append([len(dims), *sizes, *strides])
        return len(self._orders) - 1

    def scan(self, work: bytes) -> DeviceResults:
        """Start to read the rows as `work` asks for each: one launch, one copy to the host."""
        api = device_api.api_of(self.device)
        with torch_compat.no_torch_function(), torch.no_grad():
            if api is None:
                results = self._kernel.launch(self._table(0, work))
            else:
                stream = api.stream_id(api.current_stream(self.device))
                with api.guard(self.device):
                    results = self._kernel.launch(self._table(stream, work))
            return DeviceResults(copy_to_host(results), len(work))

    def _table(self, stream: int, work: bytes) -> KernelTable:
        key = (stream, work)
        fixed = self._tables.get(key)
        if fixed is None:
            fixed = self._upload_rows(work)
            self._tables.add(key, fixed)
        rows, orders, programs = fixed
        packed = self.addresses.tobytes()
        column = self._columns.get((stream, packed))
        if column is None:
            column = self._upload(torch.frombuffer(bytearray(packed or bytes(8)), dtype=torch.int64))
            self._columns.add((stream, packed), column)
        return KernelTable(rows, column, orders, programs)

    def _upload_rows(self, work: bytes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers, counts = [], []
        total = 0
        for row, wanted in zip(self._rows, work, strict=True):
            if row is None:
                numbers.append([0, 0, 0, total, 0, 0, -1, 0])
                counts.append(0)
                continue
            layout = row.layout
            programs = -(-layout.nbytes // PROGRAM_BYTES) if wanted else 0
            starts = map(signed64, layout.lane_starts)
            numbers.append([layout.nbytes, row.kind, wanted, total, *starts, row.order, layout.numel])
            counts.append(programs)
            total += programs
        index = torch.repeat_interleave(
            torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts, dtype=torch.int64)
        )
        rows = torch.tensor(numbers or [[0] * 8], dtype=torch.int64, device="cpu")
        orders = torch.tensor(self._orders, dtype=torch.int64, device="cpu")
        return self._upload(rows), self._upload(orders), self._upload(index)

    def _upload(self, host: torch.Tensor) -> torch.Tensor:
        """In order on the current stream; the pinned memory is reused only after the copy."""
        self.uploads += 1
        if device_api.api_of(self.device) is None:
            return host.to(self.device)
        return host.pin_memory().to(self.device, non_blocking=True)


class DeviceResults:
    """The results of one launch, which may still be computed. Holds no tensor of the user."""

    def __init__(self, copy: HostCopy, rows: int) -> None:
        self._copy = copy
        self._rows = rows
        self._parts: tuple[bytes, bytes] | None = None

    def ready(self) -> bool:
        return self._parts is not None or self._copy.ready()

    def _fetch(self) -> tuple[bytes, bytes]:
        if self._parts is None:
            with torch_compat.no_torch_function(), torch.no_grad():
                host = self._copy.tensor()[: self._rows]
                digests = host[:, : ResultField.VALUE].contiguous()
                numbers = array("d", _bytes_of(host[:, ResultField.VALUE :].contiguous()))
                counts = host[:, ResultField.NONFINITE].tolist()
            # Not by torch, whose square root may differ in the last bit from one processor to another.
            numbers[1::NUMBERS] = array("d", map(sqrt, numbers[1::NUMBERS]))
            numbers[2::NUMBERS] = array("d", counts)
            self._parts = _bytes_of(digests), numbers.tobytes()
        return self._parts

    def digests(self) -> bytes:
        """16 bytes per row; zeros where none was asked for. Waits for the device if necessary."""
        return self._fetch()[0]

    def numbers(self) -> bytes:
        """Three float64 per row: signed sum, norm, count of non-finite values."""
        return self._fetch()[1]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""
