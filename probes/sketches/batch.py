"""Sketches of many tensors; on a device they are queued on the user's stream and fetched later."""

from __future__ import annotations

from typing import cast

import torch

from ddpcheck.probes.digest.device_copy import HostCopy, copy_to_host
from ddpcheck.probes.sketches.sketch import (
    Sketch,
    as_real,
    bare,
    can_sketch,
    sign_table,
    sketch,
)
from ddpcheck.records.sketch_signs import BLOCK, weight

# Blocks per operation: enough to fill a device, with 17 MB of scratch memory.
_BLOCKS = 8


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


def can_add(tensor: torch.Tensor) -> bool:
    """False for sparse tensors on a device: their number of entries is only known after a wait."""
    return can_sketch(tensor) and (tensor.is_cpu or not tensor.is_sparse)


class SketchBatch:
    """Never waits for a device before `sketches` is called."""

    def __init__(self) -> None:
        self._on_cpu: dict[int, Sketch] = {}
        self._on_devices: dict[torch.device, DeviceSketches] = {}

    def __bool__(self) -> bool:
        return bool(self._on_cpu or self._on_devices)

    def add(self, index: int, tensor: torch.Tensor) -> bool:
        """Sketch `tensor` as it is now; False if it cannot be sketched."""
        if not can_add(tensor):
            return False
        if tensor.is_cpu:
            self._on_cpu[index] = sketch(tensor)
            return True
        queued = self._on_devices.get(tensor.device)
        if queued is None:
            queued = self._on_devices[tensor.device] = DeviceSketches(tensor.device)
        queued.add(index, tensor)
        return True

    def send(self) -> None:
        """Nothing more is added: start the copies from the devices to the host."""
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
