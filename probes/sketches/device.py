"""Sketches on a device: queued on the user's stream, fetched beside it, waited for when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch

from ddpcheck.probes.digest.device_copy import Copy, copy_to_host

from .sketch import Sketch, as_real, sign_table, sketch
from .weights import BLOCK, weight

# Blocks worked on at once: enough to fill a device, for 17 MB of scratch.
_BLOCKS = 8


class SketchTicket(Protocol):
    """Sketches under way."""

    def ready(self) -> bool:
        """Whether `result` would return without waiting; never waits itself."""

    def result(self) -> list[Sketch]:
        """One sketch per tensor, in the order they were given."""


class _Ready:
    __slots__ = ("_sketches",)

    def __init__(self, sketches: list[Sketch]) -> None:
        self._sketches = sketches

    def ready(self) -> bool:
        return True

    def result(self) -> list[Sketch]:
        return self._sketches


class _OnTheWay:
    __slots__ = ("_copy", "_numels")

    def __init__(self, copy: Copy, numels: list[int]) -> None:
        self._copy = copy
        self._numels = numels

    def ready(self) -> bool:
        return self._copy.ready()

    def result(self) -> list[Sketch]:
        rows = cast("list[list[float]]", self._copy.rows())
        return [
            Sketch(value, norm, int(nonfinite), numel)
            for (value, norm, nonfinite), numel in zip(rows, self._numels, strict=True)
        ]


def sketch_async(tensors: Sequence[torch.Tensor]) -> SketchTicket:
    """Sketch tensors of one device as they are at this moment, in the order of its current stream."""
    if not tensors or tensors[0].is_cpu or any(tensor.is_sparse for tensor in tensors):
        return _Ready([sketch(tensor) for tensor in tensors])
    rows = torch.stack([sketch_row(as_real(tensor.detach())) for tensor in tensors])
    return _OnTheWay(copy_to_host(rows), [tensor.numel() for tensor in tensors])


def sketch_row(tensor: torch.Tensor) -> torch.Tensor:
    """Value, norm and count of non-finite values as a float64 tensor beside `tensor`.

    The count is taken always: by the time anybody sees that it is needed, the values are gone.
    """
    device = tensor.device
    signs = sign_table(torch.float64, device)
    rows = [torch.zeros(3, dtype=torch.float64, device=device)]
    for start, part in enumerate(torch.split(tensor.reshape(-1), BLOCK * _BLOCKS)):
        wide = part.to(torch.float64)
        for block, piece in enumerate(torch.split(wide, BLOCK), start * _BLOCKS):
            value = (piece * signs[: piece.numel()]).sum() * weight(block)
            norm = torch.linalg.vector_norm(piece)
            nonfinite = piece.numel() - torch.isfinite(piece).sum()
            rows.append(torch.stack([value, norm, nonfinite.to(torch.float64)]))
    table = torch.stack(rows)
    return torch.stack([table[:, 0].sum(), torch.linalg.vector_norm(table[:, 1]), table[:, 2].sum()])
