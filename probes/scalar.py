"""One number out of a tensor, without an operator of torch on the host and without waiting for a device."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, Protocol

import torch

_LETTERS = {torch.float64: "d", torch.float32: "f", torch.float16: "e"}


class Scalar(Protocol):
    """A number that may still be on its way."""

    def ready(self) -> bool: ...

    def value(self) -> float: ...


class Known:
    """A number that lay in the host's memory."""

    def __init__(self, value: float) -> None:
        self._value = value

    def ready(self) -> bool:
        return True

    def value(self) -> float:
        return self._value


class OnTheWay:
    """A number that a device sends. Not run on a GPU so far."""

    def __init__(self, tensor: torch.Tensor) -> None:
        from ddpcheck.probes.digest.device_copy import copy_to_host

        self._copy = copy_to_host(tensor.detach().to(torch.float64, copy=True).view(1, 1))

    def ready(self) -> bool:
        return self._copy.ready()

    def value(self) -> float:
        return float(self._copy.rows()[0][0])


def read_scalar(root: Any) -> Scalar | None:
    """None for anything but one real floating-point number in plain memory."""
    # Subclasses may do anything when asked for their values.
    if type(root) is not torch.Tensor or root.numel() != 1 or root.layout != torch.strided:
        return None
    if root.is_cpu:
        return _on_host(root)
    if root.is_cuda and root.is_floating_point() and not torch.cuda.is_current_stream_capturing():
        return OnTheWay(root)
    return None


def _on_host(root: torch.Tensor) -> Known | None:
    # A negation that torch has put off leaves other bits in memory.
    if root.is_neg():
        return None
    if root.dtype == torch.bfloat16:
        return Known(struct.unpack("<f", b"\0\0" + ctypes.string_at(root.data_ptr(), 2))[0])
    letter = _LETTERS.get(root.dtype)
    if letter is None:
        return None
    return Known(struct.unpack(f"={letter}", ctypes.string_at(root.data_ptr(), root.element_size()))[0])
