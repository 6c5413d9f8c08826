"""Sketches of many tensors; on a device they are queued on the user's stream and fetched later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import cast

import torch

from ddpcheck.probes.digest.device_copy import HostCopy, copy_to_host
from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES
from ddpcheck.probes.scan.library import native_kernel
from ddpcheck.probes.sketches.sketch import (
    EXACT_IN_FLOAT32,
    Sketch,
    as_real,
    bare,
    can_sketch,
    sign_table,
    sketch,
)
from ddpcheck.records.sketch_signs import BLOCK, PIECE, weight

# Blocks per operation: enough to fill a device, with 17 MB of scratch memory.
_BLOCKS = 8
# Elements up to which tensors are sketched together; larger ones are worth operations of their own.
SMALL = 4096


class DeviceSketches:
    """The sketches of one device's tensors, in the order in which they were added."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[torch.Tensor] = []
        self._indices: list[tuple[int, int]] = []
        self._copy: HostCopy | None = None

    def add(self, index: int, tensor: torch.Tensor) -> None:
        self._rows.append(row_by_torch(as_real(bare(tensor).detach())))
        self._indices.append((index, tensor.numel()))

    def send(self) -> None:
        """Start one copy to the host for everything that was added."""
        self._copy = copy_to_host(torch.stack(self._rows))
        self._rows.clear()

    def ready(self) -> bool:
        return self._copy is not None and self._copy.ready()

    def sketches(self) -> dict[int, Sketch]:
        """By index; waits for the device if necessary."""
        if self._copy is None:
            self.send()
        rows = cast("list[list[float]]", cast("HostCopy", self._copy).rows())
        return {
            index: Sketch(value, squares**0.5, int(nonfinite), numel)
            for (index, numel), (value, squares, nonfinite) in zip(self._indices, rows, strict=True)
        }


def row_by_torch(tensor: torch.Tensor) -> torch.Tensor:
    """Value, sum of squares and count of non-finite values of the real `tensor`, as a float64 tensor on its device.

    The count is always taken: when it turns out to be needed, the values are gone.
    """
    device = tensor.device
    signs = sign_table(torch.float64, device)
    rows = [torch.zeros(3, dtype=torch.float64, device=device)]
    for start, part in enumerate(torch.split(tensor.reshape(-1), BLOCK * _BLOCKS)):
        wide = part.to(torch.float64)
        for block, piece in enumerate(torch.split(wide, BLOCK), start * _BLOCKS):
            value = (piece * signs[: piece.numel()]).sum() * weight(block)
            nonfinite = piece.numel() - torch.isfinite(piece).sum()
            rows.append(torch.stack([value, piece.square().sum(), nonfinite.to(torch.float64)]))
    return torch.stack(rows).sum(0)


class SmallSketches:
    """Sketches of small tensors on the CPU without the compiled kernel: a few operations for many of them."""

    def __init__(self) -> None:
        # By dtype: torch converts all tensors of one dtype together.
        self._tensors: dict[torch.dtype, dict[int, torch.Tensor]] = {}

    def add(self, index: int, tensor: torch.Tensor) -> bool:
        """False if the tensor has to be read by itself."""
        if native_kernel(torch.float32) is not None or tensor.dtype not in EXACT_IN_FLOAT32:
            return False
        if type(tensor) not in PLAIN_TYPES or tensor.numel() > SMALL or not tensor.is_contiguous():
            return False
        self._tensors.setdefault(tensor.dtype, {})[index] = tensor
        return True

    def sketches(self) -> dict[int, Sketch]:
        """The sketches of all tensors that were added, by index."""
        sketches: dict[int, Sketch] = {}
        for tensors in self._tensors.values():
            indices, sizes = list(tensors), [tensor.numel() for tensor in tensors.values()]
            for start, stop in _chunks(sizes):
                chosen = indices[start:stop]
                rows = _rows_of([tensors[index] for index in chosen], tuple(sizes[start:stop]))
                for index, size, value, squares in zip(chosen, sizes[start:stop], *rows, strict=True):
                    finite = math.isfinite(value) and math.isfinite(squares)
                    sketches[index] = (
                        Sketch(value, math.sqrt(squares), 0, size) if finite else sketch(tensors[index])
                    )
        return sketches


def _rows_of(tensors: list[torch.Tensor], sizes: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """The signed sum and the sum of squares of each tensor."""
    lengths, signs = _small_layout(sizes)
    with torch.no_grad():
        wide = torch.cat([tensor.view(-1) for tensor in tensors]).to(torch.float64)
        sums = torch.segment_reduce(wide * signs, "sum", lengths=lengths)
        squares = torch.segment_reduce(wide.square_(), "sum", lengths=lengths)
    return sums.tolist(), squares.tolist()


def _chunks(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Ranges of tensors that together have at most one piece of elements, so that torch stays on this thread."""
    start = elements = 0
    for position, size in enumerate(sizes):
        if elements + size > PIECE and position > start:
            yield start, position
            start, elements = position, 0
        elements += size
    if sizes:
        yield start, len(sizes)


@lru_cache(maxsize=256)
def _small_layout(sizes: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The sizes of tensors as a tensor, and their signs in sequence: each begins at the first sign."""
    table = sign_table(torch.float64, torch.device("cpu"))
    with torch.inference_mode(False):
        return torch.tensor(sizes), torch.cat([table[:size] for size in sizes])


def can_add(tensor: torch.Tensor) -> bool:
    """False for sparse tensors on a device: their number of entries is only known after a wait."""
    return can_sketch(tensor) and (tensor.is_cpu or not tensor.is_sparse)


class SketchBatch:
    """Never waits for a device before `sketches` is called."""

    def __init__(self) -> None:
        self._on_cpu: dict[int, Sketch] = {}
        self._small = SmallSketches()
        self._on_devices: dict[torch.device, DeviceSketches] = {}

    def __bool__(self) -> bool:
        return bool(self._on_cpu or self._on_devices)

    def add(self, index: int, tensor: torch.Tensor) -> bool:
        """Sketch `tensor` as it is until `send` is called; False if it cannot be sketched."""
        if not can_add(tensor):
            return False
        if tensor.is_cpu:
            if not self._small.add(index, tensor):
                self._on_cpu[index] = sketch(tensor)
            return True
        queued = self._on_devices.get(tensor.device)
        if queued is None:
            queued = self._on_devices[tensor.device] = DeviceSketches(tensor.device)
        queued.add(index, tensor)
        return True

    def send(self) -> None:
        """Nothing more is added: read what has not been read yet, and start the copies from devices to the host."""
        self._on_cpu.update(self._small.sketches())
        self._small = SmallSketches()
        for queued in self._on_devices.values():
            queued.send()

    def ready(self) -> bool:
        """Whether `sketches` would return without waiting."""
        return all(queued.ready() for queued in self._on_devices.values())

    def holds_nonfinite(self) -> bool:
        """Whether a sketch that is on the host already counts non-finite values."""
        return any(each.nonfinite for each in self._on_cpu.values())

    def may_hold_nonfinite(self) -> bool:
        """True also if it is not known yet."""
        return bool(self._on_devices) or self.holds_nonfinite()

    def sketches(self) -> dict[int, Sketch]:
        """By index; waits for devices if necessary."""
        sketches = dict(self._on_cpu)
        for queued in self._on_devices.values():
            sketches.update(queued.sketches())
        return sketches
