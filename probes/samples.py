"""A few bytes of each tensor: enough to notice a rewrite cheaply, and to show values of a step that has passed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

# Eight float32 values from the start, then a look at the middle and the end.
FIRST = 32
ELSEWHERE = 16


def first_values(tensors: Sequence[torch.Tensor]) -> bytes:
    """The first bytes of every tensor in logical order, each behind one byte that tells how many."""
    return b"".join(bytes((len(data),)) + data for data in map(_first, tensors))


def _first(tensor: torch.Tensor) -> bytes:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or type(tensor) not in _PLAIN:
        return b""
    size = min(FIRST, tensor.numel() * tensor.element_size())
    if size == 0:
        return b""
    if tensor.is_contiguous():
        return ctypes.string_at(tensor.data_ptr(), size)
    row = tensor.detach()
    while row.dim() > 1:
        row = row[0]
    row = row[: FIRST // tensor.element_size()].contiguous()
    return ctypes.string_at(row.data_ptr(), row.numel() * row.element_size())


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Baseline:
    """How tensors stood at one moment, as far as that can be told without reading them whole.

    Version counters show every write that autograd can see; writes through `.data` pass them by, and mostly touch
    the sampled places.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._marks = [_mark(tensor) for tensor in tensors]

    def moved(self, tensors: Sequence[torch.Tensor]) -> bool:
        return len(tensors) != len(self._marks) or any(
            _mark(tensor) != mark for tensor, mark in zip(tensors, self._marks, strict=True)
        )


def _mark(tensor: torch.Tensor) -> tuple[int, int, bytes]:
    version = 0 if tensor.is_inference() else tensor._version
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or type(tensor) not in _PLAIN:
        return version, id(tensor), b""
    address = tensor.data_ptr()
    size = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    size = min(size, tensor.numel() * tensor.element_size())
    if size <= FIRST + 2 * ELSEWHERE:
        return version, address, ctypes.string_at(address, size) if size else b""
    sampled = (
        ctypes.string_at(address, FIRST)
        + ctypes.string_at(address + size // 2, ELSEWHERE)
        + ctypes.string_at(address + size - ELSEWHERE, ELSEWHERE)
    )
    return version, address, sampled
