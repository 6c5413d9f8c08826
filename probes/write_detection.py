"""A few bytes of each tensor: enough to notice a rewrite, and to show values of a step that has passed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ddpcheck.probes.digest.tensor_bytes import PLAIN_TYPES, has_memory

# Eight float32 values from the start, four from the middle.
FIRST = 32
MIDDLE = 16

_NOTHING = (ctypes.c_char * 0)()


class Marks(NamedTuple):
    """How tensors stood at one moment, as far as that can be told without reading them whole.

    Version counters show every write that autograd can see. Writes through `.data` pass them by; nearly all
    of those touch the sampled places.
    """

    versions: list[int]
    first: list[bytes]
    middle: list[bytes]

    def packed(self) -> bytes:
        """The first values of every tensor, each behind one byte that tells how many bytes they take."""
        return b"".join([bytes((len(data),)) + data for data in self.first])


class Window(NamedTuple):
    """Where to look in a tensor, good for as long as its memory stays where it is."""

    place: tuple[int, int]
    first: ctypes.Array[ctypes.c_char]
    middle: ctypes.Array[ctypes.c_char]


class Sampler:
    """Samples one list of tensors again and again; what it knows of their memory is checked each time."""

    def __init__(self) -> None:
        self._windows: list[Window] = []

    def take(self, tensors: Sequence[torch.Tensor]) -> Marks:
        if len(self._windows) != len(tensors):
            self._windows = [_window(tensor) for tensor in tensors]
        windows = self._windows
        for place, tensor in enumerate(tensors):
            if _place(tensor) != windows[place].place:
                windows[place] = _window(tensor)
        return Marks(
            [version_of(tensor) for tensor in tensors],
            [window.first.raw for window in windows],
            [window.middle.raw for window in windows],
        )


def version_of(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:
        return 0  # made in inference mode: nobody counts


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and size, as a smaller tensor may come to lie where a larger one was; 0: cannot be read."""
    if type(tensor) not in PLAIN_TYPES or not tensor.is_cpu:
        return 0, 0
    try:
        # Only where memory order is logical order can the first bytes be shown as the first values.
        size = tensor.nbytes if tensor.is_contiguous() else 0
        return (tensor.data_ptr(), size) if has_memory(tensor, size, tensor.element_size()) else (0, 0)
    except RuntimeError:
        return 0, 0  # sparse and the like


def _window(tensor: torch.Tensor) -> Window:
    address, size = place = _place(tensor)
    if address == 0 or size == 0:
        return Window(place, _NOTHING, _NOTHING)
    first = (ctypes.c_char * min(FIRST, size)).from_address(address)
    if size < 2 * FIRST:
        return Window(place, first, _NOTHING)
    middle = (ctypes.c_char * MIDDLE).from_address(address + size // 2)
    return Window(place, first, middle)
