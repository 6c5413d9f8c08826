"""Sketches on a device, queued on the user's stream: three numbers a tensor that stay there until fetched."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING, cast

import torch

from ddpcheck.probes.digest.device_copy import Copy, copy_to_host
from ddpcheck.probes.sketches.sketch import (
    Sketch,
    as_real,
    bare,
    can_sketch,
    sign_table,
    sketch,
    sketch_where_it_lies,
)
from ddpcheck.records.sketch_signs import BLOCK, weight

if TYPE_CHECKING:
    from ddpcheck.probes.digest import Reading


# Blocks worked on at once: enough to fill a device, for 17 MB of scratch.
_BLOCKS = 8
# What the kernel can read; others are made wider first.
_KERNEL_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class DeviceSketches:
    """The sketches of one device's tensors, in the order they were taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[torch.Tensor] = []
        self._places: list[tuple[int, int]] = []
        self._copy: Copy | None = None

    def add(self, place: int, tensor: torch.Tensor) -> None:
        self._rows.append(sketch_row(as_real(bare(tensor).detach())))
        self._places.append((place, tensor.numel()))

    def send(self) -> None:
        """Start the way to the host, once for all that was added."""
        self._copy = copy_to_host(torch.stack(self._rows))
        self._rows.clear()

    def ready(self) -> bool:
        return self._copy is not None and self._copy.ready()

    def sketches(self) -> dict[int, Sketch]:
        """By place; waits for the device if need be."""
        if self._copy is None:
            self.send()
        rows = cast("list[list[float]]", cast("Copy", self._copy).rows())
        return {
            place: Sketch(value, squares**0.5, int(nonfinite), numel)
            for (place, numel), (value, squares, nonfinite) in zip(self._places, rows, strict=True)
        }


def sketch_row(tensor: torch.Tensor) -> torch.Tensor:
    """Value, sum of squares and count of non-finite values as a float64 tensor beside the real `tensor`.

    The count is taken always: by the time anybody sees that it is needed, the values are gone.
    """
    kernel = fused_kernel(tensor.device) if tensor.device.type == "cuda" else None
    if kernel is None or not tensor.numel():
        return row_by_torch(tensor)
    return _row_by_kernel(kernel, tensor)


def row_by_torch(tensor: torch.Tensor) -> torch.Tensor:
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


def _row_by_kernel(kernel: ModuleType, tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    if flat.dtype not in _KERNEL_DTYPES:
        flat = flat.to(torch.float64)
    signs = sign_table(torch.float32, flat.device)
    with torch.cuda.device(flat.device):
        row: torch.Tensor = kernel.launch(flat, signs, _weight_table(-(-flat.numel() // BLOCK), flat.device))
    return row


@functools.cache
def _weight_table(blocks: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor([weight(block) for block in range(blocks)], dtype=torch.float64, device=device)


@functools.cache
def fused_kernel(device: torch.device) -> ModuleType | None:
    """The kernel where Triton is installed, compiles, and agrees with the torch version right here."""
    try:
        from ddpcheck.probes.sketches import triton_kernel

        sample = torch.arange(BLOCK + 20_001, dtype=torch.float32, device=device).sin()
        if torch.allclose(_row_by_kernel(triton_kernel, sample), row_by_torch(sample), rtol=1e-9, atol=1e-9):
            return triton_kernel
    except Exception:
        # As for digests: whatever it is, torch operations do the same, only slower.
        pass
    return None


def can_keep(tensor: torch.Tensor) -> bool:
    """Not what is sparse on a device: how many entries it has could only be known by waiting."""
    return can_sketch(tensor) and (tensor.is_cpu or not tensor.is_sparse)


class SketchBatch:
    """Never waits for a device before `sketches` is asked for."""

    def __init__(self) -> None:
        self._here: dict[int, Sketch] = {}
        self._away: dict[torch.device, DeviceSketches] = {}

    def __bool__(self) -> bool:
        return bool(self._here or self._away)

    def add(self, place: int, tensor: torch.Tensor, reading: Reading | None = None) -> bool:
        """Sketch `tensor` as it is at this moment, in one go with `reading`; False where it cannot be done."""
        along = None if reading is None else reading.take
        found = sketch_where_it_lies(tensor, along)
        if found is None and not can_keep(tensor):
            return False
        if tensor.is_cpu:
            self._here[place] = found or sketch(tensor, along)
            return True
        page = self._away.get(tensor.device)
        if page is None:
            page = self._away[tensor.device] = DeviceSketches(tensor.device)
        page.add(place, tensor)
        return True

    def send(self) -> None:
        """Nothing more will come: let what is on devices set out for the host."""
        for page in self._away.values():
            page.send()

    def ready(self) -> bool:
        """Whether `sketches` would return without waiting."""
        return all(page.ready() for page in self._away.values())

    def holds_nonfinite(self) -> bool:
        """As far as it is known here and now."""
        return any(found.nonfinite for found in self._here.values())

    def may_hold_nonfinite(self) -> bool:
        """True also where it is not known yet."""
        return bool(self._away) or self.holds_nonfinite()

    def sketches(self) -> dict[int, Sketch]:
        """By place."""
        found = dict(self._here)
        for page in self._away.values():
            found.update(page.sketches())
        return found
